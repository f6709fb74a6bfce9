"""What the program of every rank does around its work: hold the folder, leave word, and end.

What it decides
    A run's folder has one gang of ranks, whose number its writers carry (``observe.fence``).
    Whatever ends a rank is reported to its launcher and written to the run's journals; so is a rank
    that is late, and one that all wait for.

Kept true (tests/multi/launch/test_launch.py, tests/multi/recsys/test_recover.py)
    A second run on a folder is refused; errors reach the launcher in one sentence.
"""

import dataclasses
import fcntl
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.base.errors import (
    CorruptError,
    EquipoiseError,
    FaultError,
    HungError,
    LayoutError,
    MismatchError,
    SpecError,
)
from equipoise.comm.group import Ranks
from equipoise.comm.standstill import Standstill
from equipoise.comm.watchdog import Watchdog
from equipoise.fault.drill.inside import Injector
from equipoise.launch.explain import folder_gone, is_gone
from equipoise.launch.last_words import say, say_late
from equipoise.launch.local import LOCK, folder_taken, folder_unlocked
from equipoise.observe.event import Kind
from equipoise.observe.fence import Fence
from equipoise.observe.journal import Journal, note

_DYING_S, _LOOK_S = 5.0, 0.05
"""For how long a folder that is held is looked at, and how often [s]."""

_STEPS = ("step", "recommend")
"""Events of a finished step, by whose length the watchdog waits."""


class FolderTakenError(LayoutError):
    """Another run holds the folder, so this one must not write a word into it."""


@contextmanager
def hold_folder(folder: Path, ranks: Ranks) -> Iterator[Fence]:
    """Hold the run's folder, so that two runs never write one journal; its epoch is theirs.

    Raises:
        FolderTakenError: another run holds it.
        LayoutError: it cannot be locked at all.
    """
    with ExitStack() as stack:
        fault: LayoutError | None = None
        fence: Fence | None = None
        if ranks.rank == 0:
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                lock = os.open(folder / LOCK, flags, 0o666)
                stack.callback(os.close, lock)
                _hold(lock)
                fence = Fence.take(folder / LOCK, lock)
            except BlockingIOError:
                fault = FolderTakenError(folder_taken(folder))
            except OSError as error:
                fault = LayoutError(folder_unlocked(folder, error))
        fault, fence = ranks.gather_objects((fault, fence))[0]
        if fault is not None or fence is None:
            raise fault or FolderTakenError(folder_taken(folder))
        yield fence


def _hold(lock: int) -> None:
    """Lock a file; one that only looks at it, or that is dying, does not keep it.

    Raises:
        BlockingIOError: somebody does.
        OSError: it cannot be locked.
    """
    until = time.monotonic() + _DYING_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(_LOOK_S)
        else:
            return


class WatchedJournal(Journal):
    """A journal whose phases are those that the watchdog names, and where a drill strikes."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        watchdog: Watchdog | None,
        fence: Fence | None,
        injector: Injector | None = None,
    ) -> None:
        super().__init__(folder, rank, fence)
        self._watchdog, self._injector = watchdog, injector

    @contextmanager
    def phase(self, name: str, **fields: Any) -> Iterator[None]:
        """Be in a block, as the watchdog knows it."""
        step = f" of step {fields['step']}" if "step" in fields else ""
        with nullcontext() if self._watchdog is None else self._watchdog.phase(name + step):
            if self._injector is not None:
                self._injector.reach(name, fields.get("step", 0))
            yield

    def write(self, kind: Kind, name: str, *, t: float | None = None, **fields: Any) -> None:
        """Append one event; from steps the watchdog learns how long they take."""
        super().write(kind, name, t=t, **fields)
        if self._watchdog is not None and kind == "scalar" and name in _STEPS:
            self._watchdog.patience.learn(fields["step_s"])


@dataclass(slots=True)
class RankWords:
    """Leaves word of what went wrong: for the launcher, and in the run's journals."""

    folder: Path
    sides: tuple[Path, ...]
    """Folders with a journal: the run's, or one for each side of a comparison."""
    rank: int
    silent: tuple[type[BaseException], ...] = (FolderTakenError,)
    """Errors after which nothing may be written to the folder."""
    fence: Fence | None = None
    """These ranks' epoch, once they hold the folder."""

    @contextmanager
    def told(self) -> Iterator[None]:
        """Leave word of whatever ends the block.

        Raises:
            FaultError: the folder is gone before these ranks hold it, whichever file was missed.
        """
        try:
            yield
        except (OSError, SpecError, LayoutError) as error:
            if self.fence is not None or not is_gone(self.folder):
                self._write(error)
                raise
            gone = FaultError(folder_gone(self.folder))
            self._write(gone)
            raise gone from error
        except BaseException as error:
            self._write(error)
            raise

    def _write(self, error: BaseException, **more: Any) -> None:
        known = isinstance(error, EquipoiseError)
        name, message = "error" if known else "exception", str(error)
        exit_code = error.exit_code if isinstance(error, EquipoiseError) else 6
        trace = "" if known else traceback.format_exc()
        kind = type(error).__name__
        blamed = error.rank if isinstance(error, CorruptError | HungError) else self.rank
        missing = error.missing if isinstance(error, HungError) else ()
        told = {"rank": blamed, "name": name, "type": kind, "message": message, "missing": missing}
        say({**told, "exit_code": exit_code, "traceback": trace})
        if isinstance(error, self.silent):
            return
        more |= {"message": message, "exit_code": exit_code}
        self._note("fault", name, type=kind, traceback=trace, **more)

    def _note(self, kind: Kind, name: str, **fields: Any) -> None:
        """Journal an event, unless newer ranks write there or the folder is gone."""
        if not self.folder.is_dir() or (self.fence is not None and self.fence.is_passed):
            return
        for side in self.sides:
            with suppress(OSError):
                side.mkdir(exist_ok=True)  # of a comparison that has not begun
            note(side, self.rank, kind, name, **fields)

    def tell(self, standstill: Standstill) -> None:
        """Leave word of a standstill; the process ends after it."""
        fields = dataclasses.asdict(standstill)
        text, waiting_rank = fields.pop("text"), fields.pop("rank")
        culprit = standstill.culprits[0] if len(standstill.culprits) == 1 else None
        error = MismatchError(text) if standstill.calls else HungError(text, rank=culprit)
        self._write(error, waiting_rank=waiting_rank, **fields)
        complain(standstill.text)

    def tell_late(self, standstill: Standstill) -> None:
        """Leave word of a long wait, or of its end; the run goes on."""
        say_late(standstill.text)
        fields = dataclasses.asdict(standstill)
        text, waiting_rank = fields.pop("text"), fields.pop("rank")
        name = "late" if standstill.culprits else "came"
        self._note("instant", name, message=text, waiting_rank=waiting_rank, **fields)


def complain(text: str) -> None:
    """Write to stderr, which may be a file on a disk that is full."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
