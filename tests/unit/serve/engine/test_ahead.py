"""Kernels that are compiled before an engine calls them, and kept."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PRINT_BITS = """
import numpy as np
from equipoise.serve.engine.kernel import attend_rows
draw = np.random.default_rng(0).standard_normal
shapes = (5, 9, 64), (300, 3, 64), (300, 3, 64)
q, k, v = (draw(shape, dtype=np.float32) for shape in shapes)
parts, o = np.empty((5, 3, 9, 66), np.float32), np.empty_like(q)
pages, positions = np.arange(75, dtype=np.int32)[None], np.arange(295, 300, dtype=np.int32)
work = np.array([(0, 0, 5, tile) for tile in range(3)], np.int32)
attend_rows(q, k, v, pages, 4, positions, work, parts, o, o[:, :, 0].copy())
print(o.tobytes().hex())
"""


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": "tests"}


def print_bits(cache: Path) -> bytes:
    return subprocess.check_output([sys.executable, "-c", PRINT_BITS], env=environment(cache))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A cache that was empty, and what the process that had a kernel compiled computed by it."""
    cache = tmp_path_factory.mktemp("numba")
    return cache, print_bits(cache)


@pytest.mark.long
def test_bits_are_the_same_where_it_was_just_compiled_and_where_it_was_kept(
    compiled: tuple[Path, bytes],
) -> None:
    """Two processes, the first of which has it compiled: 8 s."""
    cache, first = compiled
    assert print_bits(cache) == first
    assert [*cache.rglob("*attend_rows*.nbi")]


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


@pytest.mark.long
def test_what_was_compiled_ahead_is_what_an_engine_calls(compiled: tuple[Path, bytes]) -> None:
    """What the cache lacks yet; which types are compiled is asked for, not how well."""
    given = environment(compiled[0]) | {"NUMBA_OPT": "0"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_it_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    program = (
        "import os, sys; from equipoise.serve.engine.ahead import compile_ahead; "
        "sys.stdout.write(str(compile_ahead('fp32').pid)); sys.stdout.flush(); os._exit(3)"
    )
    command = [sys.executable, "-c", program]
    given = environment(tmp_path)
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and done.stderr == ""
    child = Path("/proc", done.stdout)
    deadline_s = time.monotonic() + 10
    while child.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not child.exists()
