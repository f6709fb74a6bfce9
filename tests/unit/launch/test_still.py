"""Processes that are all stopped are named once, and again when they go on; stacks are read."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from equipoise.launch.still import (
    StoppedRanks,
    describe_start,
    is_stopped,
    read_stack,
    read_traceback,
)

WAIT = "import time; print('here', flush=True); time.sleep(60)"


def wait_for(is_so) -> None:
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_all_that_are_stopped_are_named_once_and_one_alone_is_not() -> None:
    children = [subprocess.Popen([sys.executable, "-c", WAIT]) for _ in range(2)]
    said: list[tuple[str, list[int], float]] = []
    first, second = (each.pid for each in children)
    try:
        with StoppedRanks(2, lambda *words: said.append(words)) as watch:
            watch.meet(1, second)
            watch.meet(0, first)
            os.kill(first, signal.SIGSTOP)
            wait_for(lambda: is_stopped(first))
            time.sleep(1.5)
            assert not said  # the other one can speak
            os.kill(second, signal.SIGSTOP)
            wait_for(lambda: said)
            time.sleep(0.6)
            os.kill(first, signal.SIGCONT)
            wait_for(lambda: len(said) == 2)
    finally:
        for child in children:
            child.kill()
            child.wait()
    (text, processes, stopped_s), (over, none, whole_s) = said
    assert text == (
        f"All ranks are stopped (processes {first}, {second}: SIGSTOP, or a debugger). Nothing is "
        f"lost, and no deadline counts meanwhile; let them go on with kill -CONT {first} {second}."
    )
    assert processes == [first, second] and none == []
    assert over == f"The ranks go on; they were stopped for {whole_s:.0f} s."
    assert whole_s > stopped_s >= 1


def test_a_rank_that_hangs_is_aborted_with_its_stack_and_a_stopped_one_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "1").mkdir()
    log = tmp_path / "1" / "stderr.log"
    environment = os.environ | {"PYTHONFAULTHANDLER": "1", "RANK": "1"}
    command = [sys.executable, "-c", f"def hang():\n {WAIT}\nhang()"]
    assert describe_start(7, {}, tmp_path) == ("Rank 7 has no process on this machine.", "")
    for stops in (False, True):
        with log.open("w") as stream:
            child = subprocess.Popen(
                command, env=environment, stderr=stream, stdout=subprocess.PIPE, text=True
            )
            assert child.stdout is not None and child.stdout.readline() == "here\n"
            if stops:
                child.send_signal(signal.SIGSTOP)
                wait_for(partial(is_stopped, child.pid))
            sentence, stack = describe_start(1, {1: child.pid} if stops else {}, tmp_path)
            child.stdout.close()
        begin = f"Rank 1 (process {child.pid}) hangs while starting"
        if stops:
            assert (sentence, stack) == (f"{begin}: it is stopped (SIGSTOP).", "")
            assert child.wait() == -signal.SIGKILL
            continue
        assert sentence == f"{begin}, in <string>:2 (hang)."
        assert stack.splitlines() == [
            "Rank 1, innermost line first:",
            "<string>:2 (hang)",
            "<string>:3 (<module>)",
        ]
        assert child.wait() == -signal.SIGABRT
        assert read_stack(1, tmp_path)
    log.write_text("no stack\n")
    assert read_stack(1, tmp_path) == read_stack(2, tmp_path) == []


def test_a_traceback_that_ends_an_error_stream_is_read(tmp_path: Path) -> None:
    assert read_traceback(0, tmp_path) == []
    file = tmp_path / "start/attempt_0/0/stderr.log"
    file.parent.mkdir(parents=True)
    lines = ["Traceback (most recent call last):", '  File "a.py", line 3, in <module>', "    x"]
    file.write_text("\n".join(["a warning", *lines, "NameError: name 'x' is not defined"]))
    assert read_traceback(0, tmp_path) == [*lines, "NameError: name 'x' is not defined"]
    assert read_traceback(1, tmp_path) == []
    assert read_traceback(0, tmp_path, begun=time.time() + 60) == []
    file.write_text("\n".join([*lines, "NameError: x", "and it went on"]))
    assert read_traceback(0, tmp_path) == []
