"""Choose what a page draws of a run that has more steps than a screen has pixels.

Why
    A hundred thousand steps are a hundred megabytes of page. A line needs two points a
    pixel column to look the same; a timeline needs some whole steps, not all of them.

Kept true (tests/unit/dash/test_sample.py)
    First and last are always chosen; indices ascend; a line keeps its extremes.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise.observe.reader import Floats


def choose_evenly(count: int, most: int, *, tail: int = 0) -> list[int]:
    """At most ``most`` of ``range(count)``: evenly, and the last ``tail`` one by one.

    >>> choose_evenly(100, 6, tail=3)
    [0, 48, 96, 97, 98, 99]
    """
    if count <= most:
        return list(range(count))
    tail = min(tail, most - 1)
    head = np.linspace(0, count - 1 - tail, most - tail).round().astype(int)
    return sorted({*head.tolist(), *range(count - tail, count)})


def choose_points(values: Floats, most: int) -> list[int]:
    """Indices of a line's points: ends, and each bucket's lowest and highest; never a NaN.

    >>> choose_points(np.array([0.0, 1, 9, 1, 1, -5, 1, 1]), 6)
    [0, 2, 4, 5, 7]
    """
    known: NDArray[np.intp] = np.flatnonzero(~np.isnan(values))
    if known.size <= most:
        return [int(index) for index in known]
    chosen = {int(known[0]), int(known[-1])}
    for bucket in np.array_split(known, max(1, (most - 2) // 2)):
        chosen.add(int(bucket[values[bucket].argmin()]))
        chosen.add(int(bucket[values[bucket].argmax()]))
    return sorted(chosen)
