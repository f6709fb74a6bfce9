"""Join runs of tokens, and match them where they overlap.

A run is a row ``(document, start, stop)`` of an int64 array.

Kept true (tests/unit/schedule/attention/test_tiles.py, by Hypothesis)
    Joined runs are disjoint and hold the same tokens; runs meet where they share a token.
"""

import numpy as np

from equipoise.spec.pack import Pieces

NO_RUNS: Pieces = np.empty((0, 3), dtype=np.int64)


def join_runs(*parts: Pieces) -> Pieces:
    """All runs in order, adjacent ones joined.

    >>> join_runs(np.array([[0, 4, 6], [0, 8, 9]]), np.array([[0, 0, 4]])).tolist()
    [[0, 0, 6], [0, 8, 9]]
    """
    runs = np.concatenate([NO_RUNS, *parts])
    runs = runs[runs[:, 1] < runs[:, 2]]
    if not len(runs):
        return NO_RUNS
    runs = runs[np.lexsort((runs[:, 1], runs[:, 0]))]
    span = int(runs[:, 2].max()) + 1
    reach = np.maximum.accumulate(runs[:, 0] * span + runs[:, 2])
    is_first = np.ones(len(runs), dtype=bool)
    is_first[1:] = runs[1:, 0] * span + runs[1:, 1] > reach[:-1]
    begins = np.flatnonzero(is_first)
    joined = runs[begins]
    joined[:, 2] = np.maximum.reduceat(runs[:, 2], begins)
    return joined


def meet_runs(runs: Pieces, others: Pieces) -> tuple[Pieces, Pieces]:
    """Rows of ``runs`` and of ``others`` that share tokens, one pair per overlap.

    Args:
        runs: int64 [n, 3 or more], none empty.
        others: int64 [m, 3 or more], none empty, disjoint, in order of (document, start).

    Cost: O(n log m) and what is returned.

    >>> one, other = meet_runs(np.array([[0, 2, 6]]), np.array([[0, 0, 2], [0, 3, 4], [0, 5, 8]]))
    >>> one.tolist(), other.tolist()
    ([0, 0], [1, 2])
    """
    span = 1 + int(max(runs[:, 2].max(initial=0), others[:, 2].max(initial=0)))
    low = np.searchsorted(
        others[:, 0] * span + others[:, 2], runs[:, 0] * span + runs[:, 1], "right"
    )
    high = np.searchsorted(others[:, 0] * span + others[:, 1], runs[:, 0] * span + runs[:, 2])
    count = np.maximum(high - low, 0)
    one = np.repeat(np.arange(len(runs)), count)
    other = np.arange(len(one)) - np.repeat(np.cumsum(count) - count - low, count)
    return one, other


def cut_runs(runs: Pieces, others: Pieces) -> Pieces:
    """The parts of ``runs`` that lie in ``others``, in the order of ``runs``.

    Args:
        runs: int64 [n, 3], none empty.
        others: int64 [m, 3], none empty, disjoint, in order of (document, start).

    >>> cut_runs(np.array([[0, 5, 9], [1, 0, 9]]), np.array([[0, 0, 6], [1, 3, 6]])).tolist()
    [[0, 5, 6], [1, 3, 6]]
    """
    if not len(runs) or not len(others):
        return NO_RUNS
    one, other = meet_runs(runs, others)
    low = np.maximum(runs[one, 1], others[other, 1])
    return np.stack((runs[one, 0], low, np.minimum(runs[one, 2], others[other, 2])), axis=1)
