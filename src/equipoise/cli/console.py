"""What people see: a console without colour off a terminal, and bars only on one."""

import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from equipoise.base.units import format_seconds
from equipoise.base.whole import whole_number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_WIDTH_OFF_TERMINAL = 120
_MOST_COLUMNS = 10_000
_SAY_EVERY_S = 30.0


class OutputError(Exception):
    """Standard output takes no more; the message is empty if nobody reads it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _Output(io.FileIO):
    """Standard output, whose refusals are told apart from those of other files."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # What is buffered is written once more when Python ends, and then must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(error, BrokenPipeError):
                raise OutputError("", 141) from None
            why = error.strerror or str(error)
            raise OutputError(
                f"Standard output cannot be written ({why[0].lower()}{why[1:]}), so not all of "
                f"the answer was. Make room, or write it elsewhere: > FILE.",
                1,
            ) from None


@contextmanager
def guard_stdout() -> Iterator[None]:
    """Standard output while a verb runs: what it refuses is an ``OutputError``.

    Raises:
        OutputError: it is closed or full, or nobody reads it any more.
    """
    before = sys.stdout
    if before is None:
        raise OutputError(
            "Standard output is closed, so nothing could be printed. Open it, as in > /dev/null.", 1
        )
    try:
        descriptor = before.fileno()
    except (OSError, ValueError):  # a stream of a program that called us
        yield
        return
    with suppress(OSError):
        before.flush()
    # A name that an ASCII terminal cannot show must not end the program.
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output(descriptor, "w", closefd=False)),
        encoding=before.encoding,
        errors="backslashreplace",
        line_buffering=before.isatty(),
    )
    try:
        yield
        sys.stdout.flush()
    except SystemExit:  # --help and --version leave so
        sys.stdout.flush()
        raise
    finally:
        with suppress(OutputError):
            sys.stdout.flush()
        sys.stdout = before


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
    columns = whole_number(said) or 0
    return columns if 0 < columns <= _MOST_COLUMNS else otherwise


class StageProgress:
    """Shows how far a stage is: a bar on a terminal, else a line at its end and every 30 s.

    It writes to stderr, so that the answer of a verb can be piped.
    """

    def __init__(
        self,
        quiet: bool = False,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quiet, self._clock = quiet, clock
        self._file = file or sys.stderr
        self._label = ""
        self._total = 0
        self._done = 0
        self._started_s = self._said_s = 0.0
        self._bar: Progress | None = None

    def start(self, label: str, total: int) -> None:
        """A stage begins; ``total`` is in any unit that ``advance`` shares."""
        self._label, self._total, self._done = label, total, 0
        self._started_s = self._said_s = self._clock()
        if not self._quiet and self._file.isatty():
            self._bar = _make_bar(self._file)
            self._bar.add_task(label, total=total)
            self._bar.start()

    def advance(self, amount: int = 1) -> None:
        """So much more of the stage is done."""
        self._done += amount
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], amount)
        elif not self._quiet and self._clock() - self._said_s >= _SAY_EVERY_S:
            self._said_s = self._clock()
            spent = format_seconds(self._said_s - self._started_s)
            self._file.write(f"{self._label}: {self._share} after {spent}\n")
            self._file.flush()

    def finish(self) -> None:
        """The stage ended, well or not."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif not self._quiet:
            spent = format_seconds(self._clock() - self._started_s)
            is_whole = self._done >= self._total
            how = f"done in {spent}" if is_whole else f"stopped at {self._share} after {spent}"
            self._file.write(f"{self._label}: {how}\n")
            self._file.flush()

    @property
    def _share(self) -> str:
        return f"{100 * min(self._done, self._total) // max(self._total, 1)}%"


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
