"""Rows of one table into buckets of equal traffic.

Why
    Ids are skewed and old rows come first, so contiguous buckets of ML-100K's items have 1.74 to
    2.60 times the mean on their busiest rank, on 2 to 8 ranks. Modulo leaves 1.00 to 1.09.

What it decides
    The bucket of each row: rows that are looked up are dealt by how often, the hottest by
    ``partition`` and the long tail heaviest first to the lightest bucket; rows that never were,
    where rows are fewest, so that memory comes out even too.

Kept true (tests/unit/balance/test_tables.py, by Hypothesis)
    Every row has one bucket; buckets differ by one row at most wherever cold rows suffice; never
    below the bound.
"""

import numpy as np

from equipoise.balance.partition import partition
from equipoise.base.arrays import Ints
from equipoise.schedule.tables.placement import RowMap

_HOT = 1 << 15
"""Rows whose bucket is searched for; the others' counts are too small to matter."""


def deal_rows(counts: Ints, buckets: int) -> Ints:
    """The bucket of each row by its lookups, int64 [rows].

    >>> deal_rows(np.array([9, 5, 4, 0, 0, 0]), 2).tolist()
    [0, 1, 1, 0, 0, 1]
    """
    counts = np.asarray(counts, dtype=np.int64)
    order = np.argsort(-counts, kind="stable")
    looked_up = int((counts > 0).sum())
    hot, tail, cold = np.split(order, [min(_HOT, looked_up), looked_up])
    bucket_of = np.zeros(len(counts), dtype=np.int64)
    placed = partition(counts[hot], buckets)
    if placed is not None:
        bucket_of[hot] = placed
    if len(tail):
        _deal_tail(counts, bucket_of, hot, tail, buckets)
    held = np.bincount(bucket_of[order[:looked_up]], minlength=buckets)
    bucket_of[cold] = _fill(held, len(cold))
    return bucket_of


def _deal_tail(counts: Ints, bucket_of: Ints, hot: Ints, tail: Ints, buckets: int) -> None:
    """Runs of equal counts are dealt round, beginning at the lightest bucket."""
    loads = np.bincount(bucket_of[hot], counts[hot], buckets).astype(np.int64)
    starts = np.flatnonzero(np.diff(counts[tail], prepend=-1))
    for begin, end in zip(starts, [*starts[1:], len(tail)], strict=True):
        run, weight = tail[begin:end], int(counts[tail[begin]])
        room = -(-(int(loads.sum()) + weight * len(run)) // buckets)
        each = np.maximum(0, (room - loads) // weight)
        cut = np.minimum(each, np.maximum(0, len(run) - (np.cumsum(each) - each)))
        cut = cut + _round(len(run) - int(cut.sum()), np.argsort(loads + cut * weight), buckets)
        bucket_of[run] = np.repeat(np.arange(buckets), cut)
        loads += cut * weight


def _round(items: int, order: Ints, buckets: int) -> Ints:
    """Items for each bucket, dealt round in an order."""
    counts = np.full(buckets, items // buckets, dtype=np.int64)
    counts[order[: items % buckets]] += 1
    return counts


def _fill(held: Ints, items: int) -> Ints:
    """Buckets for items of no weight, so that buckets end with equally many where they can."""
    low, high = 0, int(held.max(initial=0)) + items + 1
    while low < high:  # the highest level that the items can fill every bucket up to
        level = (low + high + 1) // 2
        low, high = (
            (level, high) if int(np.maximum(0, level - held).sum()) <= items else (low, level - 1)
        )
    added = np.maximum(0, low - held)
    lowest = np.argsort(held + added, kind="stable")
    added = added + _round(items - int(added.sum()), lowest, len(held))
    return np.repeat(np.arange(len(held)), added)


def bucket_loads(counts: Ints, row_map: RowMap) -> Ints:
    """Lookups of each bucket, int64 [buckets].

    >>> bucket_loads(np.array([9, 5, 4, 0]), RowMap(4, 2))
    array([14,  4])
    """
    counts = np.asarray(counts, dtype=np.int64)
    rows = np.arange(row_map.rows)
    if row_map.buckets == "contiguous":
        owner = rows // row_map.block
    elif row_map.buckets == "modulo":
        owner = rows % row_map.shards
    else:
        owner = row_map.owner if row_map.owner is not None else rows * 0
    return np.bincount(owner, counts, row_map.shards).astype(np.int64)
