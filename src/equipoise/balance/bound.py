"""Lower bounds: what no balancer could beat."""

import numpy as np

from equipoise.base.arrays import Ints


def largest_bin_bound(weights: Ints, bins: int) -> int:
    """Least possible weight of the heaviest bin, by counting.

    The largest of: the mean; the heaviest item; and, since some bin holds ``h + 1`` of any
    ``h x bins + 1`` items, the ``h + 1`` lightest of the ``h x bins + 1`` heaviest.

    >>> largest_bin_bound(np.array([5, 1, 1]), 3), largest_bin_bound(np.array([2, 2, 3]), 2)
    (5, 4)
    >>> largest_bin_bound(np.array([6, 6, 6]), 2)
    12
    """
    weights = np.asarray(weights, dtype=np.int64)
    best = max(-(-int(weights.sum()) // bins), int(weights.max(initial=0)))
    descending = np.sort(weights)[::-1]
    for share in range(1, min(4, (len(weights) - 1) // bins) + 1):
        top = share * bins + 1
        best = max(best, int(descending[top - share - 1 : top].sum()))
    return best


def divisible_bound(weights: Ints, bins: int) -> int:
    """Least possible weight of the heaviest bin when items may be divided: the mean.

    >>> divisible_bound(np.array([5, 1, 1]), 3)
    3
    """
    return -(-int(np.asarray(weights).sum()) // bins)
