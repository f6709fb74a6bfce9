"""Kernels that are compiled before an engine calls them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import torch
from equipoise.serve.engine.ahead import compile_ahead
from equipoise.serve.engine.fused import FusedDecoder
from support.serving.paged import PLAIN, built, chunk_of, paged
import sys, os, pathlib

def kept():
    return sorted(path.name for path in pathlib.Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.nbc"))

for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
    others = kept()
    child = compile_ahead(name)
    assert child.wait() == 0, name
    before = kept()
    engine = paged(FusedDecoder(built(PLAIN, dtype)), pages=8)
    engine.run([chunk_of("a", range(8), 0, 5)], [1, 2, 3, 4, 5])
    assert kept() == before and len(before) > len(others), name
    assert compile_ahead(name) is None, name
"""

COUNT_THREADS = """
import torch
from equipoise.serve.engine.ahead import compile_ahead

assert compile_ahead("fp32") is None
print(torch.get_num_threads())
"""


@pytest.mark.long
def test_what_was_compiled_ahead_is_what_an_engine_calls(tmp_path: Path) -> None:
    # Compiling takes about ten seconds; there is no shorter way to see an empty cache filled.
    given = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": "tests"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # To look at what is kept leaves torch its threads.
    given |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}
    command = [sys.executable, "-c", COUNT_THREADS]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.long
def test_it_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    program = (
        "import os, sys; from equipoise.serve.engine.ahead import compile_ahead; "
        "sys.stdout.write(str(compile_ahead('fp32').pid)); sys.stdout.flush(); os._exit(3)"
    )
    given = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and done.stderr == ""
    child = Path("/proc", done.stdout)
    deadline_s = time.monotonic() + 240
    while child.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not child.exists()
