"""Sessions among samples, and epochs that shuffle sessions instead of samples.

Why
    Shuffled samples leave a session's rows in different batches, where nothing repeats. Sessions
    that stay together repeat their user's row; what that costs in quality is for a run to report.

What it decides
    A session is the samples of one value (a user, say) whose neighbours in time are at most a gap
    apart. An epoch in the order of sessions draws an order of sessions and keeps each one's samples
    together, in their order of time.

Kept true (tests/unit/recsys/sessions/test_order.py, by Hypothesis)
    Every sample stands once in an epoch; a session's samples are neighbours; a gap cuts.

Sources
    Clustering by session: RecD, arXiv:2211.05239, section 3.
"""

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import DataError


def find_sessions(owners: np.ndarray, stamps: Floats | None, gap: float, label: str) -> Ints:
    """The session of each sample.

    Args:
        owners: What a session belongs to, one value for each sample.
        stamps: Their times, ascending; None: all samples of a value are one session.
        gap: The longest pause inside a session, in the units of ``stamps``.
        label: Of the data, for messages.

    Returns:
        int64 [samples]; sessions are numbered by their first sample.

    Raises:
        DataError: a sample has no owner.

    >>> find_sessions(np.array(["a", "b", "a", "a"]), np.array([0.0, 1, 2, 99]), 10, "x").tolist()
    [0, 1, 0, 2]
    """
    is_null = [value != value for value in owners.tolist()]  # NaN, as nulls are read
    owners = owners.astype(str)
    empty = np.flatnonzero((np.char.strip(owners) == "") | np.array(is_null, dtype=bool))
    if len(empty):
        raise DataError(
            f"{label}, the column of sessions: {len(empty):,} of {len(owners):,} rows are empty, "
            f"the first is row {int(empty[0]) + 1:,} in order of time. Fill them or leave these "
            "rows out."
        )
    _, owner = np.unique(owners, return_inverse=True)
    order = np.argsort(owner, kind="stable")
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = np.diff(owner[order]) != 0
    if stamps is not None:
        begins[1:] |= np.diff(stamps[order]) > gap
    number = np.cumsum(begins) - 1
    # Renumber by first appearance, so that neither names nor their order matter.
    place = np.empty(int(number[-1]) + 1 if len(number) else 0, dtype=np.int64)
    place[np.argsort(order[begins], kind="stable")] = np.arange(len(place))
    session = np.empty(len(order), dtype=np.int64)
    session[order] = place[number]
    return session


def shuffle_sessions(sessions: Ints, source: np.random.Generator) -> Ints:
    """An order of all samples in which sessions are shuffled and stay whole, int64 [samples].

    >>> shuffle_sessions(np.array([0, 1, 0, 1, 2]), np.random.default_rng(1)).tolist()
    [4, 1, 3, 0, 2]
    """
    count = int(sessions.max()) + 1 if len(sessions) else 0
    place = np.empty(count, dtype=np.int64)
    place[source.permutation(count)] = np.arange(count)
    return np.argsort(place[sessions], kind="stable")
