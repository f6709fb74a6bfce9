"""How much more than the mean the fullest rank of experts gets.

Why
    All ranks wait for the one with most rows. With few tokens that is far from the mean, even if
    the router prefers nobody: of eight ranks with an expert each, one token that passes through two
    experts lets six idle, and the other two read a whole expert each.

What it decides
    Tokens choose experts independently and evenly, unless a skew says otherwise; ranks are taken to
    be independent of each other, which they nearly are.

Kept true (tests/unit/sim/serve/test_memory.py)
    Never below the mean, nor above all; equal to drawing it many times.
"""

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4096)
def fullest(draws: int, share: float, ranks: int) -> float:
    """Expected most successes of any of some ranks, where one at least has some.

    Args:
        draws: Of each rank.
        share: Chance of each draw.
        ranks: How many there are; 1 gives the mean.

    >>> fullest(1, 0.25, 1), fullest(1, 0.25, 8), round(fullest(16, 0.125, 8), 1)
    (0.25, 1.0, 4.0)
    """
    if ranks == 1 or share <= 0.0 or share >= 1.0:
        return draws * share
    counts = np.arange(draws + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, draws + 1)))])
    chance = np.exp(
        logs[-1] - logs - logs[::-1] + counts * np.log(share) + (draws - counts) * np.log1p(-share)
    )
    below = np.minimum(np.cumsum(chance), 1.0)
    return max(1.0, float((1.0 - below[:-1] ** ranks).sum()))


def fullest_over_mean(rows: int, ranks: int, skew: float) -> float:
    """Rows of the fullest rank over the mean [ratio].

    Args:
        rows: All rows that go to experts.
        ranks: Ranks that share the experts.
        skew: The same ratio for as many rows as one likes, from the router's preferences.
    """
    if ranks == 1:
        return 1.0
    return max(skew, fullest(rows, 1.0 / ranks, ranks) * ranks / rows)
