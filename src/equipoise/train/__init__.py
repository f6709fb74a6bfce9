"""The training loop. It obeys the pack, measures, and writes down both."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.train.request import compare as compare
    from equipoise.train.request import run as run

__all__ = ["compare", "run"]


def __getattr__(name: str) -> object:
    """A name of ``train.request``, imported when it is first asked for: that loads torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from equipoise.train import request

    return getattr(request, name)


def __dir__() -> list[str]:
    """The public functions too, which are not yet imported."""
    return sorted({*globals(), *__all__})
