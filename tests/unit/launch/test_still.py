"""Processes that are all stopped are named once, and again when they go on; stacks are read."""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from equipoise.base.errors import FaultError
from equipoise.launch.gang import Launch
from equipoise.launch.local import LocalRanks
from equipoise.launch.stem import Stem
from equipoise.launch.still import (
    StoppedRanks,
    describe_start,
    is_stopped,
    read_stack,
    read_traceback,
)

WAIT = "import time; print('here', flush=True); time.sleep(600)"


def wait_for(is_so) -> None:
    until = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.long
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


def test_a_stopped_process_that_starts_ranks_is_named() -> None:
    child = subprocess.Popen([sys.executable, "-c", WAIT])
    said: list[tuple[str, list[int], float]] = []
    try:
        with StoppedRanks(2, lambda *words: said.append(words), lambda: [child.pid]):
            for number, count in ((signal.SIGSTOP, 1), (signal.SIGCONT, 2)):
                child.send_signal(number)
                wait_for(lambda count=count: len(said) == count)
    finally:
        child.kill()
        child.wait()
    (text, processes, _), (over, none, whole_s) = said
    assert text == (
        f"What starts the ranks is stopped (process {child.pid}: SIGSTOP, or a debugger). Until it "
        f"goes on, no rank is started, and nobody hears of their end: kill -CONT {child.pid}."
    )
    assert processes == [child.pid] and none == []
    assert over == f"What starts the ranks goes on; it was stopped for {whole_s:.0f} s."


HANG = """
import sys
if "equipoise.fault.stem" in sys.orig_argv:
    import os, signal, time
    def mount():
        {what}
    mount()
"""


@pytest.mark.long
def test_imports_that_hang_are_ended_with_their_stack_and_those_that_are_stopped_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    launch = Launch(tmp_path, 2, quiet=True, port=0, start_s=4.0)
    (tmp_path / "sitecustomize.py").write_text(HANG.format(what="time.sleep(600)"))
    with LocalRanks(is_quiet=True) as ranks:
        ended = ranks.run(launch)
    assert ended is not None and (ended.kind, ended.rank, ended.step) == ("hung", None, None)
    assert re.fullmatch(
        "No rank has begun within 4 s: process \\d+, which imports for all of them, hangs in "
        "\\S+sitecustomize.py:6 \\(mount\\).",
        ended.sentence,
    )
    first, second, third, *_ = ended.more.splitlines()
    assert first == "Innermost line first:"
    assert (second.split()[-1], third.split()[-1]) == ("(mount)", "(<module>)")
    assert str(ended.error()).startswith(f"{ended.sentence} Run the same command again to resume")

    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    (tmp_path / "sitecustomize.py").write_text(HANG.format(what=stop))
    stopped: list[int] = []

    def note(text: str, processes: list[int], stopped_s: float) -> None:
        if processes:
            stopped.extend(processes)
            time.sleep(3.0)  # longer than it may hang
            os.kill(processes[0], signal.SIGKILL)

    with LocalRanks(is_quiet=True, note=note) as ranks:
        ended = ranks.run(dataclasses.replace(launch, start_s=2.0))
    assert len(stopped) == 1
    assert ended is not None
    assert (ended.kind, ended.sentence) == ("killed", "The ranks ended without a word.")


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
    assert read_traceback(0, tmp_path, {tmp_path / "start"}) == []
    os.utime(file, (0, 0))  # a clock that was set back
    assert (
        read_traceback(0, tmp_path, {tmp_path / "other"})[-1]
        == "NameError: name 'x' is not defined"
    )
    file.write_text("\n".join([*lines, "NameError: x", "and it went on"]))
    assert read_traceback(0, tmp_path) == []


VANISH = """
import sys
if "equipoise.fault.stem" in sys.orig_argv:
    import os, select, shutil, signal
    select.select([int(sys.orig_argv[-2])], [], [])  # until ranks are asked for: all logs are open
    shutil.rmtree({folder!r})
    if {is_killed}:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def gone(folder: Path) -> str:
    return (
        f"The run's folder {folder} is gone, so its ranks cannot start. Put it back, then run the "
        f"same command again to resume."
    )


@pytest.mark.parametrize("is_killed", [True, False])
def test_no_rank_starts_in_the_place_of_a_folder_that_vanishes_once_ranks_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """Whether the process that is asked ends with the folder, or goes on without it."""
    folder, site = tmp_path / "run", tmp_path / "site"
    site.mkdir()
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    text = VANISH.format(folder=str(folder), is_killed=is_killed)
    (site / "sitecustomize.py").write_text(text)
    launch = Launch(folder, 2, quiet=True, port=0, program="colorsys")
    with LocalRanks(is_quiet=True) as ranks:
        if is_killed:
            ended = ranks.run(launch)
            assert ended is not None and ended.kind == "killed"
        with pytest.raises(FaultError) as caught:
            ranks.run(launch)
    assert str(caught.value) == gone(folder)
    assert not folder.exists()


class LastStem(Stem):
    """One that has ended, and whose folder vanishes while another is about to take its place."""

    folder: Path

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.folder)


@pytest.mark.parametrize("vanishes", ["before the start", "before the log is open"])
def test_no_rank_starts_in_the_place_of_a_folder_that_has_vanished(
    tmp_path: Path, vanishes: str
) -> None:
    folder = tmp_path / "run"
    launch = Launch(folder, 2, quiet=True, port=0, program="colorsys")
    with LocalRanks(is_quiet=True) as ranks, (tmp_path / "log").open("wb") as log:
        if vanishes == "before the log is open":
            folder.mkdir()
            ranks._stem = last = LastStem("colorsys", log.fileno())
            last.folder = folder
            last._process.kill()
            last._process.wait()
        with pytest.raises(FaultError) as caught:
            ranks.run(launch)
    assert str(caught.value) == gone(folder)
    assert not folder.exists()
