"""One start of a run's ranks: their agent, what the ranks say, and how they end.

What it decides
    A gang is started to work at once, as a fork of the launcher's stem (``stem``), or to be kept
    ready (``spares``): then torchrun's agent starts ranks that import their program and wait.

Kept true (tests/unit/launch/test_local.py, tests/multi/launch/test_launch.py)
    The agent of this machine has the command of all forms; it ends with its launcher.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from equipoise.launch import spare
from equipoise.launch.agent import (
    PROGRAM,
    SPARE,
    agent_command,
    end_with_parent,
    whole_environment,
)
from equipoise.launch.ends import RankEnds
from equipoise.launch.last_words import VARIABLE, listen
from equipoise.launch.stem import GangOrder, Stem, StemAgent
from equipoise.launch.still import (
    Note,
    StoppedRanks,
    describe_imports,
    describe_start,
    is_stopped,
)

START_S = 600.0
"""The longest wait for imports, which take some seconds [s]; as ranks wait for one that starts."""

_LOOK_S = 0.25

_MOST = 4
"""Most ranks that hang while starting whose stacks are read."""


@dataclass(frozen=True, slots=True)
class KeptReady:
    """When ranks of the next start are started, to be kept ready."""

    after_s: float
    """From the first step of a start on [s]."""
    needs_room: bool
    """Whether they are only where the host has memory for them twice over."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Ranks to start: the folder of a resolved run, how many, and how loud."""

    folder: Path
    ranks: int
    quiet: bool
    port: int
    proves: bool = True
    """Whether ranks on devices that are not CPUs prove the layout before the first step."""
    spares: KeptReady | None = None
    """Ranks of the next start; none unless given."""
    program: str = PROGRAM
    """The program of a rank, a module; ranks that were kept ready import its ``AHEAD`` and
    call its ``main``."""
    start_s: float = START_S
    """The longest wait for the imports of its ranks [s]."""

    @property
    def arguments(self) -> list[str]:
        """What the program is started with."""
        quiet = ["--quiet"] if self.quiet else []
        return [str(self.folder), *quiet, *([] if self.proves else ["--no-proof"])]


def spares_command(launch: Launch) -> list[str]:
    """The command of the agent that starts ranks to be kept ready."""
    return [
        *agent_command(sys.executable, launch.ranks, "--standalone"),
        "--local-addr=127.0.0.1",
        f"--log-dir={launch.folder / 'logs'}",
        "--redirects=2",
        "--monitor-interval=0.1",
        *SPARE,
        launch.program,
        *launch.arguments,
    ]


class RankGang:
    """A started agent and its ranks.

    Args:
        launch: What to start.
        show: Gets sentences of the ranks for the user.
        note: As for ``StoppedRanks``.
        log: The agent's error stream.
        mode: In which it is opened; ``a+b`` keeps what is there.
        whence: The stem that it is forked from; or where ranks that are kept ready report.

    Raises:
        OSError: the log cannot be opened.
    """

    def __init__(
        self,
        launch: Launch,
        show: Callable[[str], object],
        note: Note,
        log: Path,
        mode: str,
        whence: Stem | str,
    ) -> None:
        self.logs = launch.folder / "logs"
        self.earlier = frozenset(self.logs.glob("*"))
        """What other starts have left there."""
        self._start_s, self._log_path = launch.start_s, log
        self._stack = ExitStack()
        self.starts: list[tuple[str, str]] = []
        """A sentence and a stack for each rank that hangs while it starts."""
        with ExitStack() as opening:
            self._log = opening.enter_context(log.open(mode))
            address, self.heard = opening.enter_context(listen(show))
            self._begin = self._log.seek(0, os.SEEK_END)
            self.agent: StemAgent | subprocess.Popen[bytes]
            if isinstance(whence, Stem):
                logs, words = str(self.logs), launch.arguments
                asked = GangOrder(launch.ranks, logs, launch.port, words, {VARIABLE: address})
                self.agent = whence.start(asked, self._log.fileno())
                opening.callback(self.agent.close)
            else:
                self.agent = subprocess.Popen(
                    spares_command(launch),
                    stderr=self._log,
                    env={**whole_environment(), VARIABLE: address, spare.VARIABLE: whence},
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            self.stopped = opening.enter_context(StoppedRanks(launch.ranks, note, self._starters))
            self._stack = opening.pop_all()
        self.ends = RankEnds(self.agent, self.agent.kill)
        self.heard.met, self.heard.missed = self._meet, self._miss

    def _starters(self) -> list[int]:
        return self.agent.starters if isinstance(self.agent, StemAgent) else [self.agent.pid]

    def begin(self) -> None:
        """Wait until the agent has begun; imports that hang are ended, and described."""
        agent, waited_s = self.agent, 0.0
        if not isinstance(agent, StemAgent):
            return
        while not agent.begins_within(_LOOK_S):
            stem = agent.starters[0]
            waited_s += 0.0 if is_stopped(stem) else _LOOK_S
            if waited_s >= self._start_s:
                self.starts.append(describe_imports(stem, self._log_path, self._start_s))
                agent.wait()

    def _meet(self, rank: int, process: int) -> None:
        self.ends.meet(rank, process)
        self.stopped.meet(rank, process)

    def _miss(self, ranks: Sequence[int]) -> None:
        processes = self.stopped.processes
        places = processes, self.logs, self.earlier
        self.starts += [describe_start(each, *places) for each in ranks[:_MOST]]

    def close(self) -> str:
        """What the agent wrote, once it has ended; its ranks may still be dying."""
        self._log.seek(self._begin)
        words: bytes = self._log.read()
        self._stack.close()
        return words.decode(errors="replace")

    def wait_until_gone(self) -> None:
        """Return when its ranks are gone; the kernel takes a tenth of a second to free theirs."""
        self.ends.wait_for_all()
