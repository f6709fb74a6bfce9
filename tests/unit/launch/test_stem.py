"""A stem and what is forked from it, with a small program in place of training."""

import dataclasses
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from equipoise.launch.gang import Launch
from equipoise.launch.local import LocalRanks
from equipoise.launch.stem import GangOrder, Stem, StemAgent

PROGRAM = """
import os, pathlib, signal, sys, time
AHEAD = ("ahead",)
def main():
    folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
    rank = os.environ["RANK"]
    facts = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "SAID")]
    (folder / f"began-{rank}").write_text(" ".join([*facts, *sys.argv, str(os.getpid())]))
    print("rank", rank, file=sys.stderr)
    if what == "wait" or what == "fail" and rank == "0":
        time.sleep(600)
    return 7 if what == "fail" else 0
"""


class Started:
    """A stem of a program, and the log of its agents."""

    def __init__(self, folder: Path, program: str = PROGRAM) -> None:
        self.folder, self.log = folder, folder / "agent.log"
        (folder / "twig.py").write_text(program)
        (folder / "ahead.py").write_text('open("imports", "a").write("ahead ")')
        self._agents: list[StemAgent] = []
        with self.log.open("ab") as log:
            self.stem = Stem("twig", log.fileno())

    def start(self, what: str, ranks: int = 2) -> StemAgent:
        logs, words = str(self.folder / "logs"), [str(self.folder), what]
        with self.log.open("ab") as log:
            asked = GangOrder(ranks, logs, 0, words, {"SAID": "yes"})
            self._agents.append(self.stem.start(asked, log.fileno()))
        return self._agents[-1]

    def close(self) -> None:
        self.stem.close()
        for agent in self._agents:
            agent.close()

    def facts(self, rank: int) -> list[str]:
        """What a rank has written of its start, once it has."""
        file = self.folder / f"began-{rank}"
        wait_until(lambda: file.exists() and file.read_text())
        return file.read_text().split()

    def errors(self) -> list[str]:
        """What each rank of the only start wrote to its error stream."""
        return [file.read_text() for file in sorted(self.folder.glob("logs/start-*/*/stderr.log"))]


def wait_until(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + 240
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    made = Started(tmp_path)
    yield made
    made.close()


def test_starts_share_the_imports_and_ranks_are_those_of_a_fresh_process(started: Started) -> None:
    agents = []
    for ranks in (2, 1):
        agents.append(started.start("done", ranks))
        assert agents[-1].wait() == 0
        began = started.facts(0)
        assert began[:2] == ["0", str(ranks)]
        assert began[3:-1] == ["yes", "twig", str(started.folder), "done"]
    assert agents[0].pid != agents[1].pid
    assert (started.folder / "imports").read_text() == "ahead "
    assert started.errors().count("rank 0\n") == 2
    assert started.stem.is_alive


def test_a_rank_that_a_signal_ends_ends_the_others_and_stays_to_be_read(started: Started) -> None:
    agent = started.start("wait")
    zero, one = (int(started.facts(rank)[-1]) for rank in range(2))
    words = Path(f"/proc/{one}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert [word.decode() for word in words[2:]] == [
        *("-m", "twig", str(started.folder), "wait", "RANK=1"),
    ]
    os.kill(one, signal.SIGKILL)
    assert agent.wait() == agent.poll() == 1
    assert is_gone(zero)
    assert f"rank      : 1\n  exitcode  : -9 (pid: {one})\n" in started.log.read_text()


def test_a_rank_that_fails_lets_the_others_leave_word(started: Started) -> None:
    agent = started.start("fail")
    zero = int(started.facts(0)[-1])
    assert agent.wait() == 1
    assert is_gone(zero)
    said = started.log.read_text()
    assert said.index("rank      : 1\n  exitcode  : 7 ") < said.index("exitcode  : -15 ")


def test_an_agent_is_asked_and_ended_and_others_follow(started: Started) -> None:
    asked = started.start("wait")
    one = int(started.facts(1)[-1])
    asked.terminate()
    assert asked.wait() == 1 and is_gone(one)
    (started.folder / "began-0").unlink()
    ended = started.start("wait", 1)
    zero = int(started.facts(0)[-1])
    assert ended.poll() is None
    ended.kill()
    assert ended.wait() == -signal.SIGKILL
    wait_until(lambda: is_gone(zero))
    ended.kill()  # there is nobody any more
    assert started.start("done", 1).wait() == 0


def test_whatever_was_forked_ends_with_the_stem(started: Started) -> None:
    agent = started.start("wait")
    ranks = [int(started.facts(rank)[-1]) for rank in range(2)]
    started.stem.close()
    assert agent.wait() == -signal.SIGKILL
    wait_until(lambda: all(map(is_gone, ranks)))
    assert not started.stem.is_alive


def test_what_cannot_be_imported_fails_in_every_rank_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    made = Started(tmp_path, "raise ImportError('no card')")
    assert made.start("done").wait() == 1
    made.close()
    errors = made.errors()
    assert len(errors) == 2 and any(each.endswith("ImportError: no card\n") for each in errors)


def test_an_agent_that_cannot_start_its_ranks_says_why_once(started: Started) -> None:
    launch = Launch(started.folder, 1, quiet=True, port=0, program="twig")
    with socket.create_server(("127.0.0.1", 0)) as taken, LocalRanks(is_quiet=True) as ranks:
        port = taken.getsockname()[1]
        ended = ranks.run(dataclasses.replace(launch, port=port))
        assert ended is not None and (ended.kind, ended.exit_code) == ("refused", 2)
        assert str(ended.error()) == (
            f"Port {port} cannot be used (Address already in use). Choose another with --port, or "
            "omit --port to take any free one."
        )
        most = resource.getrlimit(resource.RLIMIT_NOFILE)
        process = ranks._stem._process.pid if ranks._stem is not None else 0
        resource.prlimit(process, resource.RLIMIT_NOFILE, (5, most[1]))
        ended = ranks.run(launch)
        assert ended is not None and (ended.kind, ended.exit_code) == ("refused", 6)
        assert str(ended.error()) == (
            f"The ranks of {started.folder} cannot be started (Too many open files). Run the same "
            "command again to resume from the last checkpoint."
        )


WAIT = """
import pathlib, sys, time
AHEAD = ()
def main():
    pathlib.Path(sys.argv[1], "began").touch()
    time.sleep(600)
"""


def test_ctrl_c_is_heard_whatever_thread_the_kernel_gives_it_to(started: Started) -> None:
    """As after a suspension, when the first thread that goes on may get it."""
    (started.folder / "tree.py").write_text(WAIT)
    launch = Launch(started.folder, 1, quiet=True, port=0, program="tree")

    def interrupt() -> None:
        wait_until((started.folder / "began").exists)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        wait_until((started.folder / "stop").exists)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    with ThreadPoolExecutor(1) as thread, LocalRanks(is_quiet=True) as ranks:
        interrupted = thread.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            ranks.run(launch)
        interrupted.result()


def test_a_start_from_a_stem_that_has_just_ended_ends_as_its_ranks_would(started: Started) -> None:
    os.kill(started.stem._process.pid, signal.SIGKILL)
    wait_until(lambda: not started.stem.is_alive)
    assert started.start("done").wait() == -signal.SIGKILL
