"""What a start can begin before it has imported anything: it takes seconds and other cores.

Why
    torch, numba and a model's weights take a process seconds. Meanwhile another one can compile the
    kernels that a first start lacks, and a third load the libraries of further ranks.

What it decides
    Whether kernels may be missing, by the names of files alone: the process that compiles looks
    closer, and ends at once where nothing is missing.

Kept true (tests/unit/serve/test_early.py)
    Importing this loads no torch. It starts nothing where kernels were kept.
"""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

_PROGRAM = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[2]):
    from equipoise.serve.engine.ahead import compile_lacking
    compile_lacking(sys.argv[1])
"""
"""It ends with the process that started it, even before it has loaded anything."""

_KEPT = "kernel.attend_rows-*.nbi"
"""numba's index of a kernel that every engine on a CPU needs."""

_RANK = "equipoise.serve.longctx.worker"
"""What a rank runs, with all that it imports."""


def start_compiling(dtype: str) -> "subprocess.Popen[bytes]":
    """Start a process that compiles the kernels that numba's cache lacks.

    Args:
        dtype: What the engine will compute in: fp32 or bf16.
    """
    command = [sys.executable, "-c", _PROGRAM, dtype, str(os.getpid())]
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, stderr=null)


def compile_early(dtype: str) -> "subprocess.Popen[bytes] | None":
    """``start_compiling`` if no kernel was ever kept here; None otherwise."""
    if any(next(folder.rglob(_KEPT), None) for folder in _cache_folders()):
        return None
    return start_compiling(dtype)


def load_for_ranks() -> None:
    """Start the process that ranks are forked from; it loads what they need."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([_RANK])
    forkserver.ensure_running()


def _cache_folders() -> list[Path]:
    """Where numba may keep kernels: as it is set, else beside the source or for the user."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(chosen)]
    beside = Path(__file__).parent / "engine" / "__pycache__"
    return [beside, Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "numba"]
