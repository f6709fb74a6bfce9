"""Verbs: their exit code, and what they wrote to stdout and stderr.

``start`` is ``equipoise train`` in a process of its own; others run in this one, which imports
what ranks need only once.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from equipoise.cli.main import main

DEADLINE_S = 120.0


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main([*map(str, argv)])
    caught = capsys.readouterr()
    return code, caught.out, caught.err


def plan(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    return run(capsys, "plan", *argv)


def train_while(act: Callable[[], object], *words: object) -> int:
    """``equipoise train`` in this process, while a thread acts upon it; the exit code."""
    return run_while(act, "train", *words)


def run_while(act: Callable[[], object], *words: object) -> int:
    """A verb in this process, while a thread acts upon it; the exit code."""
    with ThreadPoolExecutor(1) as thread:
        acted = thread.submit(act)
        code = main([*map(str, words)])
        acted.result(DEADLINE_S)
    return code


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "equipoise.cli.main", "train", *map(str, words)]


def start(*words: object, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command(*words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def end_of(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
