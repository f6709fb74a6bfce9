"""What C prints inside a block does not reach standard output; what stands around it does."""

import ctypes
import os
import subprocess
import sys
import textwrap

from equipoise.base.silent import silent_stdout


def _run(body: str) -> str:
    script = "import ctypes\nfrom equipoise.base.silent import silent_stdout\n"
    script += textwrap.dedent(body)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return ran.stdout


def test_what_c_prints_inside_a_block_is_dropped_and_the_rest_arrives_in_order() -> None:
    said = _run(
        """
        c = ctypes.CDLL(None)
        print("before")
        c.printf(b"C before\\n")
        with silent_stdout():
            c.printf(b"inside\\n")
        c.printf(b"C after\\n")
        c.fflush(None)
        print("after")
        """
    )
    assert said.split("\n") == ["before", "C before", "C after", "after", ""]


def test_an_error_inside_a_block_restores_standard_output() -> None:
    said = _run(
        """
        try:
            with silent_stdout():
                raise ValueError
        except ValueError:
            print("restored")
        """
    )
    assert said == "restored\n"


def test_a_closed_standard_output_is_left_alone() -> None:
    script = "import os; os.close(1); from equipoise.base.silent import silent_stdout\n"
    script += "with silent_stdout(): pass"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_no_descriptor_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with silent_stdout():
        ctypes.CDLL(None).printf(b"dropped")
    assert len(os.listdir("/proc/self/fd")) == before
