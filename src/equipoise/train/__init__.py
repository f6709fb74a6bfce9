"""The training loop. It obeys the pack, measures, and writes down both."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.train.request import run as run

__all__ = ["run"]


def __getattr__(name: str) -> object:
    """``run``, imported when it is first asked for: it loads torch."""
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from equipoise.train.request import run

    return run
