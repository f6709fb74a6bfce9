"""On which numbers of ranks `equipoise check` proves."""

from collections.abc import Sequence

from equipoise.base.errors import SpecError


def read_worlds(ranks: Sequence[int]) -> list[int]:
    """Numbers of ranks, each once, the fewest first.

    Raises:
        SpecError: one of them is below 1.
    """
    if min(ranks) < 1:
        raise SpecError(f"--ranks {min(ranks)} is below 1. Give 1 or more ranks.")
    return sorted(set(ranks))
