"""Items of known weight into bins: longest first, then repair. Integers, no ties left open.

Why
    Packing, sharding and placement all end in this question. Whole documents into a few
    bins: longest-processing-time first lands within a thousandth of the bound when no single
    item dominates, in microseconds; repair takes most of what is left.

Kept true (tests/unit/balance/test_partition.py, by Hypothesis)
    Every item has one bin; no bin is over its capacity; never below the bound; repair never
    makes the heaviest bin heavier; the answer depends on the arguments alone.

Sources
    LPT: R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969.
"""

import heapq

import numpy as np

from equipoise.balance.bound import largest_bin_bound
from equipoise.cost.work import Ints


def partition(
    weights: Ints, bins: int, *, sizes: Ints | None = None, capacity: int | None = None
) -> Ints | None:
    """Give each item a bin so that the heaviest bin is light.

    Args:
        weights: Weight of each item, >= 0; what is balanced.
        bins: Number of bins, >= 1.
        sizes: Size of each item (tokens); equals ``weights`` unless given.
        capacity: Most size that one bin holds; none unless given.

    Returns:
        The bin of each item, or None when greedy placement finds no room for some item.

    Cost: O(n log n) without a capacity that binds.

    >>> partition(np.array([4, 3, 2, 2, 1]), 2).tolist()
    [0, 1, 1, 0, 1]
    """
    sizes = weights if sizes is None else sizes
    limit = int(sizes.sum()) if capacity is None else capacity
    order = np.lexsort((np.arange(len(weights)), -sizes, -weights))
    bin_of = np.zeros(len(weights), dtype=np.int64)
    heap = [(0, 0, index) for index in range(bins)]
    for item in order.tolist():
        weight, size = int(weights[item]), int(sizes[item])
        full = []
        while heap and heap[0][1] + size > limit:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, used, index = heap[0]
        heapq.heapreplace(heap, (load + weight, used + size, index))
        bin_of[item] = index
        for entry in full:
            heapq.heappush(heap, entry)
    _repair(weights, sizes, bin_of, bins, limit)
    return bin_of


def _repair(weights: Ints, sizes: Ints, bin_of: Ints, bins: int, limit: int) -> None:
    """Move or swap items between the heaviest and the lightest bin while that helps."""
    loads = np.bincount(bin_of, weights, bins).astype(np.int64)
    used = np.bincount(bin_of, sizes, bins).astype(np.int64)
    bound = largest_bin_bound(weights, bins)
    for _ in range(4 * bins + 16):
        high, low = int(loads.argmax()), int(loads.argmin())
        spread = int(loads[high] - loads[low])
        if loads[high] <= bound or spread <= 1:
            return
        givers = np.flatnonzero(bin_of == high)
        takers = np.flatnonzero(bin_of == low)
        # Row for each item of the heavy bin, column for each of the light one; the last
        # column stands for taking nothing back.
        given, given_size = weights[givers][:, None], sizes[givers][:, None]
        back = np.append(weights[takers], 0)[None, :]
        back_size = np.append(sizes[takers], 0)[None, :]
        shift, shift_size = given - back, given_size - back_size
        fits = (used[low] + shift_size <= limit) & (used[high] - shift_size <= limit)
        helps = fits & (shift > 0) & (shift < spread)
        if not helps.any():
            return
        miss = np.where(helps, np.abs(2 * shift - spread), np.iinfo(np.int64).max)
        row, column = np.unravel_index(int(miss.argmin()), miss.shape)
        bin_of[givers[row]] = low
        if column < len(takers):
            bin_of[takers[column]] = high
        loads[high] -= shift[row, column]
        loads[low] += shift[row, column]
        used[high] -= shift_size[row, column]
        used[low] += shift_size[row, column]
