"""Processes that cannot speak for themselves: ranks that are all stopped, or hang while they start.

Why
    The watchdog of each rank watches the others. Where all are stopped (a debugger, a batch system
    that suspends jobs, a signal to the whole group), nobody is left to say so; and a rank that
    hangs before it has met the others has no watchdog yet. Nor have the processes that start ranks:
    while they are stopped or hang, nobody begins and nobody hears of an end.

What it decides
    The launching command looks at the state that the kernel has of each process. If all ranks are
    stopped, or a process that starts them is, it says so, and again when they go on; it ends
    nothing, since deadlines do not count while a process is stopped. A rank that the others have
    waited for in vain is made to write its stack: Python's own handler of SIGABRT
    (``PYTHONFAULTHANDLER``) does that from the first import on, even inside of C code, and the
    process ends with it. So is a process whose imports for all ranks take ten minutes.

Kept true (tests/unit/launch/test_still.py, tests/multi/launch/test_still.py)
    Who is stopped is named once and runs to its end when it goes on; a rank that sleeps while
    starting is named with its line, and counts as hung; so does a hang before there are ranks.

Sources
    Letters of process states: proc_pid_stat(5).
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from equipoise.launch.ends import has_ended

_LOOK_S, _STILL_S = 0.25, 1.0
"""Between looks, and how long all are stopped before that is said [s]."""

_STACK_S, _END_LOOK_S = 30.0, 0.05
"""The longest wait for a process to write its stack and end, and between looks [s]: it takes a
tenth of a second, unless the machine is busy."""

_MOST_LINES = 12

_TRACEBACK = "Traceback (most recent call last):"

Note = Callable[[str, list[int], float], object]
"""Takes a sentence, the processes that it is about, and the seconds that they stood still."""


def is_stopped(process: int) -> bool:
    """Whether a signal or a debugger has stopped a process."""
    try:
        _, _, after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")
    except OSError:
        return False
    return after_name.split()[0] in "Tt"


class StoppedRanks:
    """Watches for processes of this machine that are stopped, on a thread of its own.

    Args:
        ranks: How many there are; they count once all of them are stopped.
        note: Called when they have been stopped for a second, and when one of them goes on.
        starters: Processes that start ranks, as far as they are known; each of them counts.
    """

    def __init__(
        self, ranks: int, note: Note, starters: Callable[[], Sequence[int]] = tuple
    ) -> None:
        self.ranks, self._note, self._starters = ranks, note, starters
        self.processes: dict[int, int] = {}
        """Process of each rank that has said which it is."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stopped-ranks", daemon=True)

    def meet(self, rank: int, process: int) -> None:
        """Watch this rank from now on."""
        self.processes[rank] = process

    def __enter__(self) -> "StoppedRanks":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        ranks = _Stop(tell_stopped, "The ranks go on; they were")
        starters = _Stop(tell_stopped_starters, "What starts the ranks goes on; it was")
        while not self._ended.wait(_LOOK_S):
            processes = [process for _, process in sorted(self.processes.items())]
            are_all = len(processes) == self.ranks and all(map(is_stopped, processes))
            for watched, stopped in (
                (ranks, processes if are_all else []),
                (starters, [each for each in self._starters() if is_stopped(each)]),
            ):
                if said := watched.look(stopped):
                    self._note(*said)


@dataclass(slots=True)
class _Stop:
    """A stop of some processes: since when, and whether that was said."""

    tell: Callable[[Sequence[int]], str]
    go_on: str
    since: float | None = None
    is_said: bool = False

    def look(self, stopped: Sequence[int]) -> tuple[str, list[int], float] | None:
        """What is to be noted now, if anything."""
        now = time.monotonic()
        if stopped:
            self.since = now if self.since is None else self.since
            if self.is_said or now - self.since < _STILL_S:
                return None
            self.is_said = True
            return self.tell(stopped), [*stopped], now - self.since
        since, was_said = self.since, self.is_said
        self.since, self.is_said = None, False
        if since is None or not was_said:
            return None
        return f"{self.go_on} stopped for {now - since:.0f} s.", [], now - since


def tell_stopped(processes: Sequence[int]) -> str:
    """A sentence on ranks that are all stopped.

    >>> tell_stopped([11, 12])[:46]
    'All ranks are stopped (processes 11, 12: SIGST'
    """
    return (
        f"All ranks are stopped ({_listed(processes)}: SIGSTOP, or a debugger). Nothing is lost, "
        f"and no deadline counts meanwhile; let them go on with kill -CONT "
        f"{' '.join(map(str, processes))}."
    )


def tell_stopped_starters(processes: Sequence[int]) -> str:
    """A sentence on stopped processes that start ranks and wait for their end.

    >>> tell_stopped_starters([11])[:67]
    'What starts the ranks is stopped (process 11: SIGSTOP, or a debugge'
    """
    return (
        f"What starts the ranks is stopped ({_listed(processes)}: SIGSTOP, or a debugger). Until "
        f"it goes on, no rank is started, and nobody hears of their end: kill -CONT "
        f"{' '.join(map(str, processes))}."
    )


def _listed(processes: Sequence[int]) -> str:
    plural = "process" if len(processes) == 1 else "processes"
    return f"{plural} {', '.join(map(str, processes))}"


def describe_imports(process: int, log: Path, waited_s: float) -> tuple[str, str]:
    """Where a process hangs that imports for all ranks: a sentence, and its stack; it is ended.

    Args:
        process: It.
        log: Its error stream.
        waited_s: For how long it was waited for [s].
    """
    begin = (
        f"No rank has begun within {waited_s:g} s: process {process}, which imports for all of "
        f"them, hangs"
    )
    stack = _abort(process, lambda: _stack_in(_read(log)))
    if not stack:
        return f"{begin}, and does not say where.", ""
    return f"{begin} in {stack[0]}.", "\n".join(["Innermost line first:", *stack])


def describe_start(
    rank: int, processes: Mapping[int, int], logs: Path, earlier: Collection[Path] = ()
) -> tuple[str, str]:
    """Where a rank hangs while it starts: a sentence, and its stack; the process is ended.

    Args:
        rank: That has not come.
        processes: Of the ranks that have said which they are.
        logs: Folder of the ranks' error streams.
        earlier: What other starts have left there.
    """
    process = processes.get(rank, 0) or _find(rank)
    if not process:
        return f"Rank {rank} has no process on this machine.", ""
    begin = f"Rank {rank} (process {process}) hangs while starting"
    if is_stopped(process):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        return f"{begin}: it is stopped (SIGSTOP).", ""
    stack = _abort(process, lambda: read_stack(rank, logs, earlier))
    if not stack:
        return f"{begin}, and does not say where.", ""
    return f"{begin}, in {stack[0]}.", "\n".join([f"Rank {rank}, innermost line first:", *stack])


def _abort(process: int, read: Callable[[], list[str]]) -> list[str]:
    """Make a process write its stack and end; the stack, empty if it did not.

    It is read when the process has ended: before, some of its lines may be missing.
    """
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGABRT)
    until = time.monotonic() + _STACK_S
    while not has_ended(process) and time.monotonic() < until:
        time.sleep(_END_LOOK_S)
    stack = read()
    if not stack:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return stack


def _find(rank: int) -> int:
    """The process of a rank that has not said which it is: a child of an agent of this command."""
    word, own = f"RANK={rank}".encode(), {os.getpid()}
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            _, _, after_name = (entry / "stat").read_text().rpartition(")")
            parents[int(entry.name)] = int(after_name.split()[1])
    for _ in range(3):  # the stem, its agent, and its ranks
        own |= {child for child, parent in parents.items() if parent in own}
    for child in sorted(own - {os.getpid()}):
        with suppress(OSError):
            shown = Path(f"/proc/{child}/environ"), Path(f"/proc/{child}/cmdline")
            if any(word in each.read_bytes().split(b"\0") for each in shown):
                return child
    return 0


def read_stack(rank: int, logs: Path, earlier: Collection[Path] = ()) -> list[str]:
    """The lines of a rank's stack that Python wrote when it was aborted, innermost first."""
    return _stack_in(_stderr(rank, logs, earlier))


def _stack_in(text: str) -> list[str]:
    _, mark, after = text.rpartition("Fatal Python error: Aborted")
    if not mark:
        return []
    _, _, thread = after.partition("Current thread")
    lines = re.findall(r'^  File "(.*?)", line (\d+) in (.*)$', thread.split("\n\n")[0], re.M)
    return [f"{file}:{line} ({name})" for file, line, name in lines[:_MOST_LINES]]


def read_traceback(rank: int, logs: Path, earlier: Collection[Path] = ()) -> list[str]:
    """The lines of the traceback that ends a rank's error stream; none if no traceback does.

    A rank that fails while it imports its program cannot tell its launcher.

    Args:
        rank: That has ended.
        logs: Folder of the ranks' error streams.
        earlier: What other starts have left there, by no clock, which may have been set back.
    """
    _, mark, after = _stderr(rank, logs, earlier).rstrip().rpartition(_TRACEBACK)
    lines = after.splitlines()
    if not mark or not lines or not re.match(r"[\w.]+(: |$)", lines[-1]):
        return []
    return [mark, *lines[1:]]


def _stderr(rank: int, logs: Path, earlier: Collection[Path] = ()) -> str:
    """A rank's error stream of its last start."""
    try:
        times = [
            (each.stat().st_mtime, each)
            for each in logs.glob(f"**/{rank}/stderr.log")
            if not any(above in earlier for above in each.parents)
        ]
    except OSError:  # somebody is removing them
        return ""
    return _read(max(times)[1]) if times else ""


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:  # somebody has removed it
        return ""
