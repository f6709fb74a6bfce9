"""The median of repeated measurements, with a confidence interval.

What it decides
    Order statistics only: no distribution is assumed, since times have a floor and a long tail.
    The interval runs from the ``i``-th smallest to the ``i``-th largest sample, for the largest
    ``i`` that covers the median with 95%; with fewer than 6 samples it is their whole range.

Kept true (tests/unit/cost/curves/test_interval.py, by Hypothesis)
    The interval contains the median; on drawn samples its coverage is as stated.
"""

import math
import statistics
from collections.abc import Sequence

from equipoise.spec.device.parts import Measured

_MISSES = 0.05


def median_interval(samples: Sequence[float]) -> Measured:
    """Median and 95% interval of at least one sample.

    >>> median_interval([5, 1, 4, 2, 3, 6, 9, 7])
    Measured(mid=4.5, low=1, high=9)
    """
    ordered = sorted(samples)
    count = len(ordered)
    rank, below = 0, 2.0**-count
    while rank + 1 <= (count - 1) // 2:
        following = below + math.comb(count, rank + 1) * 2.0**-count
        if 2 * following > _MISSES:
            break
        rank, below = rank + 1, following
    return Measured(statistics.median(ordered), ordered[rank], ordered[count - 1 - rank])
