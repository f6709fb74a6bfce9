"""What people see: a console without colour off a terminal, and bars only on one."""

import os
import sys
import time
from typing import TYPE_CHECKING, TextIO

from equipoise.base.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_WIDTH_OFF_TERMINAL = 120
_MOST_COLUMNS = 10_000


def make_console(quiet: bool = False, file: TextIO | None = None) -> "Console":
    """A rich console on stdout, or on ``file``; it is silent when ``quiet``."""
    from rich.console import Console

    stream = file or sys.stdout
    is_terminal = stream.isatty()
    return Console(
        file=stream,
        quiet=quiet,
        force_terminal=is_terminal,  # whatever FORCE_COLOR says: a file gets no escapes
        width=None if is_terminal else width_off_terminal(),
        highlight=False,
        markup=False,
    )


def width_off_terminal(otherwise: int = _WIDTH_OFF_TERMINAL) -> int:
    """Columns of what is piped or written to a file: what COLUMNS says, else ``otherwise``."""
    said = os.environ.get("COLUMNS", "")
    return int(said) if said.isdecimal() and 0 < int(said) <= _MOST_COLUMNS else otherwise


class StageProgress:
    """Shows how far a stage is: a bar on a terminal, else one line when the stage ends.

    It writes to stderr, so that the answer of a verb can be piped.
    """

    def __init__(self, quiet: bool = False, file: TextIO | None = None) -> None:
        self._quiet = quiet
        self._file = file or sys.stderr
        self._label = ""
        self._total = 0
        self._done = 0
        self._started_s = 0.0
        self._bar: Progress | None = None

    def start(self, label: str, total: int) -> None:
        """A stage begins; ``total`` is in any unit that ``advance`` shares."""
        self._label, self._total, self._done = label, total, 0
        self._started_s = time.monotonic()
        if not self._quiet and self._file.isatty():
            self._bar = _make_bar(self._file)
            self._bar.add_task(label, total=total)
            self._bar.start()

    def advance(self, amount: int = 1) -> None:
        """So much more of the stage is done."""
        self._done += amount
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], amount)

    def finish(self) -> None:
        """The stage ended, well or not."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif not self._quiet:
            spent = format_seconds(time.monotonic() - self._started_s)
            is_whole = self._done >= self._total
            how = f"done in {spent}" if is_whole else f"stopped at {self._share} after {spent}"
            self._file.write(f"{self._label}: {how}\n")
            self._file.flush()

    @property
    def _share(self) -> str:
        return f"{100 * self._done // self._total}%"


def make_progress(quiet: bool = False) -> StageProgress:
    """Progress on stderr."""
    return StageProgress(quiet)


def _make_bar(file: TextIO) -> "Progress":
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        Elapsed(),
        console=make_console(file=file),
    )
