"""The progress bar and lines that rank 0 shows during a run; no bar off a terminal."""

import sys
from contextlib import suppress
from io import TextIOWrapper
from types import TracebackType
from typing import Protocol, Self

from equipoise.base.units import format_count, format_seconds


class StepView(Protocol):
    """Shows steps as they finish."""

    def show(self, step: int, loss: float, tokens_per_s: float, mfu: float, skew: float) -> None:
        """Show a finished step."""

    def say(self, line: str) -> None:
        """Show a sentence."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class QuietView:
    """Shows at most sentences: off a terminal, on other ranks and under --quiet."""

    def __init__(self, *, talks: bool) -> None:
        self._talks = talks

    def show(self, step: int, loss: float, tokens_per_s: float, mfu: float, skew: float) -> None:
        """Do nothing."""

    def say(self, line: str) -> None:
        """Print the line, on the rank that talks."""
        if self._talks:
            try:
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
            except BrokenPipeError:  # the reader left (``| head``); the run continues
                self._talks = False
            except OSError as error:
                self._talks = False
                with suppress(OSError):
                    sys.stderr.write(
                        f"Standard output cannot be written ({error.strerror}). The run goes on, "
                        f"and its journal has every step.\n"
                    )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class BarView:
    """A progress bar with the newest step's figures."""

    def __init__(self, label: str, *, steps: int, done: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            Remaining(compact=True),
            TextColumn("{task.fields[figures]}"),
        )
        self._task = self._progress.add_task(label, total=steps, completed=done, figures="")

    def show(self, step: int, loss: float, tokens_per_s: float, mfu: float, skew: float) -> None:
        """Move the bar and change its figures."""
        figures = f"loss {loss:.3f}  {tokens_per_s:,.0f} tok/s  mfu {mfu:.0%}  skew {skew:.2f}"
        self._progress.update(self._task, completed=step, figures=figures)

    def say(self, line: str) -> None:
        """Print above the bar."""
        self._progress.console.print(line, highlight=False, markup=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def make_view(label: str, *, rank: int, steps: int, done: int, quiet: bool) -> StepView:
    """The view of a rank: a bar on rank 0 at a terminal, else sentences or silence.

    A name that stdout cannot show, as that of a document, must not end a run.
    """
    if rank == 0 and not quiet and isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if rank == 0 and not quiet and sys.stdout.isatty():
        return BarView(label, steps=steps, done=done)
    return QuietView(talks=rank == 0 and not quiet)


def summary_line(steps: int, tokens: int, took_s: float, loss: float) -> str:
    """The sentence at the end of a run.

    >>> summary_line(10, 40_960, 20.0, 5.125)
    '10 steps, 41.0k tokens in 20.00 s (2,048 tokens/s); loss 5.125.'
    """
    rate = tokens / took_s if took_s else 0.0
    return (
        f"{steps} step{'s' * (steps != 1)}, {format_count(tokens)} tokens in "
        f"{format_seconds(took_s)} ({rate:,.0f} tokens/s); loss {loss:.3f}."
    )
