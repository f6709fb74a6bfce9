"""A stem as its launcher has it: a process that has imported a rank's program and forks gangs.

Why
    What takes longest in a start are imports: some seconds of a core for every rank, and for their
    agent. A process that has them behind it makes another in a tenth of a second.

What it decides
    A launcher has one stem for all its starts. Each start is a fork of it that is the agent of its
    own ranks, which are forks of the agent (``fault.stem``). A stem holds no file of the run, no
    device and no thread, so what is forked from it is what a fresh process would be.

Kept true (tests/unit/launch/test_stem.py, tests/multi/fault/test_recover.py)
    A start that follows a fault imports nothing again. A stem ends with its launcher, an agent with
    its stem, a rank with its agent.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from equipoise.launch.agent import STEM, end_with_parent, whole_environment

NAME_BYTES = 4096
"""Room for the names of forked processes, as ``ps`` shows them [bytes]."""

MESSAGE_BYTES = 128 << 10
"""Most bytes of a message to the stem."""

_KILLED = -signal.SIGKILL


@dataclass(frozen=True, slots=True)
class GangOrder:
    """A gang to fork."""

    ranks: int
    logs: str
    """Folder for the error streams of its ranks."""
    port: int
    """Where the ranks meet; 0 for any that is free."""
    arguments: Sequence[str]
    """What the program is started with."""
    environment: Mapping[str, str]
    """Set in the agent and its ranks."""


class StemAgent:
    """An agent that a stem forks: what a launcher does with ``subprocess.Popen``.

    Args:
        stem: Its parent.
        line: Brings its number, then its exit code, or why it started no ranks; ends with it.
    """

    def __init__(self, stem: "subprocess.Popen[bytes]", line: socket.socket) -> None:
        self._stem, self._line = stem, line
        self._pid: int | None = None
        self.returncode: int | None = None
        self.refused: OSError | None = None
        """Why it could not start its ranks."""

    @property
    def pid(self) -> int:
        """Its number, as soon as the stem has done its imports; -1 if it never began."""
        while self._pid is None and self.returncode is None:
            self._hear()
        return -1 if self._pid is None else self._pid

    @property
    def starters(self) -> list[int]:
        """The stem, and the agent as soon as that is known."""
        return [self._stem.pid, *([] if self._pid is None else [self._pid])]

    def begins_within(self, seconds: float) -> bool:
        """Wait for its begin; whether it has begun, or ended, by then."""
        until = time.monotonic() + seconds
        while self._pid is None and self.returncode is None:
            if not select.select([self._line], [], [], max(0.0, until - time.monotonic()))[0]:
                return False
            self._hear()
        return True

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        with suppress(BlockingIOError):  # it has said nothing new
            while self.returncode is None:
                self._hear(socket.MSG_DONTWAIT)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended by then.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left_s = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._line], [], [], left_s)[0]:
                raise subprocess.TimeoutExpired(self._stem.args, timeout or 0.0)
            self._hear()
        return self.returncode

    def kill(self) -> None:
        """End it at once, and its ranks with it."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask its ranks to finish their step."""
        self._signal(signal.SIGTERM)

    def close(self) -> None:
        """Let go of the line."""
        self._line.close()

    def _signal(self, number: int) -> None:
        if self._pid is None:  # nobody may have waited for it yet
            self.poll()
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._stem.pid if self._pid is None else self._pid, number)

    def _hear(self, flags: int = 0) -> None:
        try:
            words = self._line.recv(64, flags).split()
        except ConnectionResetError:
            words = []
        if not words:
            self.returncode = _KILLED
        elif words[0] == b"begun":
            self._pid = int(words[1])
        elif words[0] == b"refused":
            number = int(words[1])
            self.returncode, self.refused = 1, OSError(number, os.strerror(number))
        else:
            self.returncode = int(words[1])


class Stem:
    """A started stem.

    Args:
        program: Of the ranks, a module.
        log: File of its own error stream.
    """

    def __init__(self, program: str, log: int) -> None:
        self.program = program
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *STEM, program, str(theirs.fileno()), " " * NAME_BYTES],
                stderr=log,
                env=whole_environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @property
    def is_alive(self) -> bool:
        """Whether another gang can be forked from it."""
        return self._process.poll() is None

    def start(self, asked: GangOrder, log: int) -> StemAgent:
        """Have a gang forked, whose agent writes its errors to ``log``.

        Where the stem has ended just now, so has that agent.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = json.dumps(asdict(asked)).encode()
            with suppress(ConnectionError):
                socket.send_fds(self._door, [words], [log, theirs.fileno()])
        return StemAgent(self._process, ours)

    def close(self) -> None:
        """End it, and whatever it has forked."""
        self._process.kill()
        self._process.wait()
        self._door.close()
