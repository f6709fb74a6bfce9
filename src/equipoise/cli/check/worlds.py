"""On which numbers of ranks `equipoise check` proves."""

from collections.abc import Sequence

from equipoise.base.errors import SpecError
from equipoise.cli.counts import MOST_SHARING


def read_worlds(ranks: Sequence[int]) -> list[int]:
    """Numbers of ranks, each once, the fewest first.

    Raises:
        SpecError: one of them is below 1, or more than can be played in turns.
    """
    if min(ranks) < 1:
        raise SpecError(f"--ranks {min(ranks)} is below 1. Give 1 or more ranks.")
    if max(ranks) > MOST_SHARING:
        raise SpecError(
            f"--ranks {max(ranks):,} is more than {MOST_SHARING:,}. Give {MOST_SHARING:,} or less."
        )
    return sorted(set(ranks))
