"""Ranks whose collectives do not match are named with both sides, though gloo hangs or aborts."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from equipoise.base.errors import FaultError
from equipoise.comm.local import run_ranks
from support.health import mismatch_ranks

FIX = (
    "Results from there on are wrong, so the ranks end. Make all ranks call the same collectives "
    "in one order, then run the same command again to resume from the last checkpoint."
)
AT = r"( at health/mismatch_ranks.py:\d+ \(call_otherwise\) \(reduce of step 7\))?"
SUM = "all_reduce of float32 \\[1000\\]"


def told_of(folder: Path, world: int, function, *args) -> str:
    with pytest.raises(FaultError) as caught:
        run_ranks(world, function, folder, *args, timeout_s=mismatch_ranks.DEADLINE_S / 4)
    assert " gave no answer within " not in str(caught.value), "nobody named it"
    (text,) = {file.read_text() for file in folder.glob("told-*")}
    return text


@pytest.mark.parametrize(
    ("case", "other"),
    [
        ("operation", r"all_gather of float32 \[1000\] into \[3, 1000\]"),
        ("skipped", r"all_gather of float32 \[1000\] into \[3, 1000\]"),
        ("size", r"all_reduce of float32 \[500\]"),
        ("dtype", r"all_reduce of int32 \[1000\]"),
    ],
)
def test_both_sides_are_named(tmp_path: Path, case: str, other: str) -> None:
    text = told_of(tmp_path, 3, mismatch_ranks.call_otherwise, case)
    assert re.fullmatch(
        rf"Collective 91 of ranks 0, 1, 2 does not match: ranks 0, 1 called {SUM}{AT}; rank 2 "
        rf"called {other}{AT}\. {re.escape(FIX)}",
        text,
    ), text


def test_groups_in_another_order(tmp_path: Path) -> None:
    text = told_of(tmp_path, 2, mismatch_ranks.cross)
    at = r" at health/mismatch_ranks.py:\d+ \(cross\) \(backward of step 3\)"
    assert re.fullmatch(
        r"Ranks 0, 1 wait for each other, each in a collective that another has not entered: "
        rf"rank 0 in collective 2 of ranks 0, 1, all_reduce of float32 \[5\]{at}; rank 1 in "
        rf"collective 2 of ranks 0, 1, all_reduce of float32 \[6\]{at}\. That cannot end, so the "
        r"ranks do\. Make all ranks call the same .*",
        text,
    ), text


def test_what_may_differ_ends_nothing(tmp_path: Path) -> None:
    run_ranks(3, mismatch_ranks.differ_rightly, tmp_path, timeout_s=60.0)
    assert not list(tmp_path.glob("told-*"))


def test_an_abort_still_ends_a_process(tmp_path: Path) -> None:
    """And is held up for as long as both sides need to be named."""
    code = "import os; from equipoise.comm.abort import *; delay_aborts(); {}os.abort()"
    for more, least_s in (("", 5.0), ("restore_aborts(); ", 0.0)):
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code.format(more)], check=False)
        assert done.returncode == -signal.SIGABRT
        assert time.monotonic() - began >= least_s
