"""How uneven loads are: the largest over the mean.

Kept true (tests/unit/schedule/expert/test_schedule.py)
    Between 1 and the number of loads; 1 where all are equal, or zero.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from equipoise.base.arrays import Ints


def load_skew(loads: Sequence[int] | Ints) -> float:
    """The largest load over the mean; 1 if all are 0.

    >>> load_skew([6, 2, 4, 0]), load_skew([0, 0])
    (2.0, 1.0)
    """
    counts = np.asarray(loads, dtype=np.int64)
    total = int(counts.sum())
    return int(counts.max()) * counts.size / total if total else 1.0


def layer_skews(loads: Sequence[Sequence[int]] | Ints) -> Iterator[float]:
    """``load_skew`` of each layer's experts, int64 [layers, X]."""
    return (load_skew(each) for each in np.asarray(loads, dtype=np.int64))
