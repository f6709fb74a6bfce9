"""Lower bounds: what no balancer could beat."""

from equipoise.cost.work import Ints


def largest_bin_bound(weights: Ints, bins: int) -> int:
    """Least possible weight of the heaviest bin: the mean, or one whole item.

    >>> import numpy as np
    >>> largest_bin_bound(np.array([5, 1, 1]), 3), largest_bin_bound(np.array([2, 2, 3]), 2)
    (5, 4)
    """
    total = int(weights.sum())
    return max(-(-total // bins), int(weights.max(initial=0)))
