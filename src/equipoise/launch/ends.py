"""See the end of a rank when it happens, and by which signal.

Why
    The agent looks at its ranks ten times a second, waits until all others have ended, and only
    then reports. Until it does, a killed rank costs seconds in which nothing is decided.

What it decides
    A rank names its process to the launcher, which waits for the end of that process without being
    its parent. The kernel keeps a dead process's status until the agent has read it; if the agent
    was faster, or the rank ended by itself, the agent's report says more, and is waited for.

Kept true (tests/unit/launch/test_ends.py, tests/multi/fault/test_recover.py)
    A signal is named within a tenth of a second; ranks that end with their agent are not accused.

Sources
    Status of a process that nobody has waited for: proc_pid_stat(5), field 52.
"""

import os
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_GONE_S = 10.0
"""Longest wait for a process that was killed: the kernel frees its memory first."""


@dataclass(frozen=True, slots=True)
class Killed:
    """A rank that a signal ended."""

    rank: int
    process: int
    signal: int


class Process(Protocol):
    """A process by its number."""

    @property
    def pid(self) -> int:
        """It; known once it has begun."""


class RankEnds:
    """Waits for the ends of ranks, each in a thread of its own.

    Args:
        agent: The process that started them; their parent.
        react: Called once, when a signal has ended the first rank.
    """

    def __init__(self, agent: Process, react: Callable[[], object]) -> None:
        self._agent, self._react = agent, react
        self._lock = threading.Lock()
        self._waits: list[threading.Thread] = []
        self.first: Killed | None = None
        """The first rank that a signal ended, if that was seen."""

    def meet(self, rank: int, process: int) -> None:
        """Wait for the end of this rank from now on."""
        try:
            file = os.pidfd_open(process)
        except OSError:  # it has ended already, or the kernel is older than Linux 5.3
            return
        wait = threading.Thread(target=self._wait, args=(file, rank, process), daemon=True)
        self._waits.append(wait)
        wait.start()

    def _wait(self, file: int, rank: int, process: int) -> None:
        select.select([file], [], [])
        os.close(file)
        number = signal_of(process)
        if number is None or number == signal.SIGTERM or has_ended(self._agent.pid):
            return  # SIGTERM is the agent's own, and its ranks end with it
        with self._lock:
            is_first = self.first is None
            if is_first:
                self.first = Killed(rank, process, number)
        if is_first:
            self._react()

    def wait_for_all(self) -> None:
        """Wait until every rank that was met is gone, once their agent is."""
        for wait in self._waits:
            wait.join(_GONE_S)


def signal_of(process: int) -> int | None:
    """The signal that ended a process; None if none did, or its parent has read it already."""
    try:
        *_, after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")
        state, *fields = after_name.split()
        status = int(fields[-1])
    except (OSError, ValueError, IndexError):
        return None
    if state != "Z" or not os.WIFSIGNALED(status):
        return None
    return os.WTERMSIG(status)


def has_ended(process: int) -> bool:
    """Whether a process has ended, be its status read or not."""
    try:
        *_, after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")
    except OSError:
        return True
    return after_name.split()[0] in "ZX"
