"""Choose what a page draws of a run that has more steps than a screen has pixels.

Why
    A hundred thousand steps are a hundred megabytes of page, and a line through each of
    them is a smear. A line needs a point every few pixels and the scatter of its steps;
    a timeline needs some whole steps, not all of them.

Kept true (tests/unit/dash/test_sample.py)
    Evenly chosen steps ascend and hold the first and the last; buckets hold each known
    value once, in order, and are of one size but for the last.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.base.arrays import Floats

WHOLE_STEPS = 60
"""Steps that a figure holds one by one."""
LAST_STEPS = 12
"""The last of them, without a gap."""


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


def bucket(values: Floats, most: int) -> list[NDArray[np.intp]]:
    """Indices of the known values, dealt in order into at most ``most`` even buckets.

    All but the last hold the same number: a line of medians of two and then of one would
    look as if the run had grown noisier.

    >>> [part.tolist() for part in bucket(np.array([0.0, 1, np.nan, 3, 4]), 2)]
    [[0, 1], [3, 4]]
    """
    known = np.flatnonzero(~np.isnan(values))
    size = max(1, -(-known.size // most))
    return [known[at : at + size] for at in range(0, known.size, size)]


def plain_list(values: Any) -> Any:
    """Numbers at six figures, None for NaN; whole numbers whole."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, list):
        return [plain_list(value) for value in values]
    if isinstance(values, int):
        return values
    if not math.isfinite(values):
        return None
    whole = int(values)
    return whole if whole == values else float(f"{values:.6g}")
