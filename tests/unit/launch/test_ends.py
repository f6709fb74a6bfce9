"""The end of a rank is seen at once, with its signal, by who is not its parent."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from equipoise.launch.ends import Killed, RankEnds, signal_of

AGENT = """
import subprocess, sys, time
ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
print(*[rank.pid for rank in ranks], flush=True)
time.sleep(60)  # reads no status
"""
"""Starts two processes, says which, and does not wait for them."""


class Gang:
    def __init__(self) -> None:
        words = [sys.executable, "-c", AGENT]
        self.agent = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.ranks = [int(word) for word in self.agent.stdout.readline().split()]
        self.reacted = 0
        self.has_reacted = threading.Event()
        self.ends = RankEnds(self.agent, self.react)
        for rank, process in enumerate(self.ranks):
            self.ends.meet(rank, process)

    def react(self) -> None:
        self.reacted += 1
        self.has_reacted.set()

    def close(self) -> None:
        for process in self.ranks:
            os.kill(process, signal.SIGKILL)
        self.agent.kill()
        self.agent.communicate()
        self.ends.wait_for_all()


@pytest.fixture
def gang() -> Iterator[Gang]:
    gang = Gang()
    yield gang
    gang.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_first_rank_that_a_signal_ends_is_named_once(gang: Gang, number: int) -> None:
    os.kill(gang.ranks[1], number)
    assert gang.has_reacted.wait(120)
    os.kill(gang.ranks[0], signal.SIGKILL)
    gang.ends.wait_for_all()
    assert (gang.reacted, gang.ends.first) == (1, Killed(1, gang.ranks[1], number))


def test_ranks_that_end_after_their_agent_or_by_its_signal_are_not_accused(gang: Gang) -> None:
    os.kill(gang.ranks[0], signal.SIGTERM)
    gang.agent.kill()
    os.waitid(os.P_PID, gang.agent.pid, os.WEXITED | os.WNOWAIT)
    os.kill(gang.ranks[1], signal.SIGKILL)
    gang.ends.wait_for_all()
    assert gang.ends.first is None


def test_a_process_that_lives_or_is_gone_was_not_ended_by_a_signal() -> None:
    assert signal_of(os.getpid()) is None
    done = subprocess.Popen(["true"])
    done.wait()
    assert signal_of(done.pid) is None
    RankEnds(done, print).meet(0, done.pid)


def test_a_process_that_a_signal_ended_has_it_until_it_is_read() -> None:
    process = subprocess.Popen(["sleep", "60"])
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    named = signal_of(process.pid)
    process.wait()
    assert (named, signal_of(process.pid)) == (signal.SIGKILL, None)
