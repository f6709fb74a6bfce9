"""Rows that are alike in some columns, a million at a time.

Kept true (tests/unit/plan/space/test_alike.py, by Hypothesis)
    Each row is in one group; two rows share one if and only if they are alike.
"""

from collections.abc import Sequence

import numpy as np

from equipoise.base.arrays import Ints


def group_alike(columns: Sequence[Ints]) -> list[Ints]:
    """Places that are alike in every column, together.

    Args:
        columns: Numbers of 0 or more, int64 [n] each; the cost is linear in the largest.

    >>> [group.tolist() for group in group_alike([np.array([5, 2, 5]), np.array([1, 1, 1])])]
    [[1], [0, 2]]
    """
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        place = np.cumsum(np.bincount(column) > 0) - 1
        if len(place) and place[-1]:
            code = code * (place[-1] + 1) + place[column]
    # Numbers of 16 bits are sorted digit by digit, ten times as fast.
    order = np.argsort(code.astype(np.min_scalar_type(code.max(initial=0))), kind="stable")
    breaks = np.flatnonzero(np.diff(code[order])) + 1
    return np.split(order, breaks) if len(order) else []
