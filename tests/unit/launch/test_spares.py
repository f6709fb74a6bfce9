"""A rank that is kept ready, with a small program in place of training."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from equipoise.fault import recover
from equipoise.launch import spares
from equipoise.launch.doctor.cgroup import Quota
from equipoise.launch.gang import KeptReady, Launch
from equipoise.launch.spare import AT_WORK, EARLY, IMPORT, READY, VARIABLE, WAITING, state_of
from equipoise.spec.run.spec import FaultSpec
from support.verbs import wait_until

PROGRAM = """
import os, sys
print("imported", flush=True)
AHEAD = ("ahead",)
def main():
    score = open("/proc/self/oom_score_adj").read().strip()
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    print(os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"], sys.argv, score, nice)
    return 7
"""


class Waiting:
    """A rank that is kept ready, and its launcher's end of their line."""

    def __init__(self, folder: Path, rank: int, program: str = PROGRAM) -> None:
        (folder / "program.py").write_text(program)
        (folder / "ahead.py").write_text('print("ahead", flush=True)')
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.door.bind("")
        self.door.listen()
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "4",
            VARIABLE: self.door.getsockname()[1:].decode(),
        }
        words = [sys.executable, "-m", "equipoise.launch.spare", "program", "RUN", "--quiet"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
        self.line, _ = self.door.accept()

    def close(self) -> None:
        self.line.close()
        self.door.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Waiting]:
    rank = Waiting(tmp_path, 1)
    yield rank
    rank.close()


def score_of(process: int | str) -> int:
    return int(Path(f"/proc/{process}/oom_score_adj").read_text())


def test_it_imports_when_asked_and_runs_when_it_is_its_turn(waiting: Waiting) -> None:
    process = waiting.process.pid
    assert state_of(process) == EARLY
    assert score_of(process) == min(1000, score_of("self") + 500)
    waiting.line.send(IMPORT)
    waiting.line.send(IMPORT)  # by who hurries
    assert waiting.line.recv(64) == READY
    assert state_of(process) == EARLY
    waiting.line.send(READY)  # by the launcher, once all have come
    wait_until(lambda: state_of(process) == WAITING)
    assert len(list(Path(f"/proc/{process}/task").iterdir())) <= 2  # the thread may still end
    waiting.line.send(b"2")
    out, _ = waiting.process.communicate(timeout=240)
    assert waiting.process.returncode == 7
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    ran = f"2 2 ['program', 'RUN', '--quiet'] {score_of('self')} {nice}"
    assert out.splitlines() == ["imported", "ahead", ran]


def test_it_begins_at_once_where_nobody_let_it_import(waiting: Waiting) -> None:
    waiting.line.send(b"4")
    out, _ = waiting.process.communicate(timeout=240)
    assert (waiting.process.returncode, out.splitlines()[0]) == (7, "imported")


@pytest.mark.parametrize("word", [b"", b"1"])
def test_it_ends_without_its_launcher_and_where_fewer_go_on(waiting: Waiting, word: bytes) -> None:
    if word:
        waiting.line.send(word)  # ranks 0 to 0, and this is 1
    else:
        waiting.line.close()
    out, _ = waiting.process.communicate(timeout=240)
    assert (waiting.process.returncode, out) == (0, "")


def test_what_cannot_be_imported_ends_it(tmp_path: Path) -> None:
    rank = Waiting(tmp_path, 0, "raise ImportError('no card')")
    rank.line.send(IMPORT)
    assert rank.line.recv(64) == b""
    assert rank.process.wait(240) == 1
    rank.close()


def test_any_other_process_is_at_work() -> None:
    assert state_of(os.getpid()) == AT_WORK


@pytest.mark.parametrize(
    ("rules", "port", "kept"),
    [
        (FaultSpec(spares="auto"), 0, KeptReady(30.0, needs_room=True)),
        (FaultSpec(spares="at-once"), 0, KeptReady(0.0, needs_room=False)),
        (FaultSpec(), 0, None),
        (FaultSpec(spares="auto", restarts=0), 0, None),
        (FaultSpec(spares="at-once", on=()), 0, None),
        (FaultSpec(spares="at-once"), 29_500, None),
    ],
)
def test_who_is_kept_ready(
    rules: FaultSpec, port: int, kept: KeptReady | None, tmp_path: Path
) -> None:
    assert recover._kept(rules, Launch(tmp_path, 2, True, port)) == kept


def test_there_is_room_where_the_host_has_twice_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spares, "available_bytes", lambda: 2 * 3 * spares._PROCESS_BYTES)
    monkeypatch.setattr(spares, "read_quota", lambda: Quota(None, None))
    assert spares.has_room(2) and not spares.has_room(3)
    monkeypatch.setattr(spares, "read_quota", lambda: Quota(None, 1 << 20))
    assert not spares.has_room(2)
