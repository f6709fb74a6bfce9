"""Where parts begin: every rank's rows cut into equally many, as even as whole rows are.

Kept true (tests/multi/parallel/test_overlap.py)
    Parts of a count sum to it, and differ by one row at most.
"""

import numpy as np

from equipoise.base.arrays import Ints


def part_rows(rows: Ints, parts: int) -> Ints:
    """Rows of each part of each count, int64 [parts, *rows.shape].

    >>> part_rows(np.array([5, 2]), 3).tolist()
    [[1, 0], [2, 1], [2, 1]]
    """
    ends = rows * np.arange(parts + 1).reshape(-1, *(1 for _ in rows.shape)) // parts
    return np.diff(ends, axis=0)
