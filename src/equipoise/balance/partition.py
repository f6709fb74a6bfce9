"""Items of known weight into bins: longest first, then repair. Integers, no ties left open.

Why
    Packing, sharding and placement all come down to this problem. For whole documents in a
    few bins, longest-processing-time first lands within a thousandth of the bound in
    microseconds unless one item dominates; repair removes most of the rest.

What it decides
    The bin of each item. Ties go by (weight, size, index), so every rank that holds the
    same integers finds the same answer without a message.

Kept true (tests/unit/balance/test_partition.py, by Hypothesis)
    Every item has one bin; no bin is over its capacity; never below the bound; repair never
    makes the heaviest bin heavier; the answer depends on the arguments alone; on small cases
    it is near the exact one.

Sources
    LPT: R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969.
    Differencing over k bins: R. E. Korf, "Multi-way number partitioning", IJCAI 2009.
"""

import heapq
import itertools

import numpy as np

from equipoise.balance.bound import largest_bin_bound
from equipoise.base.arrays import Ints

_PARTNERS = 4
"""Lightest bins with which repair tries an exchange before it gives up."""


def partition(
    weights: Ints,
    bins: int,
    *,
    sizes: Ints | None = None,
    capacity: int | None = None,
    filled: tuple[Ints, Ints] | None = None,
) -> Ints | None:
    """Give each item a bin so that the heaviest bin is light.

    Args:
        weights: Weight of each item, >= 0; what is balanced.
        bins: Number of bins, >= 1.
        sizes: Size of each item (tokens); equals ``weights`` unless given.
        capacity: Most size that one bin holds; none unless given.
        filled: Weight and size already in each bin; none unless given.

    Returns:
        The bin of each item; None if greedy placement finds no room for an item.

    Cost: O(n log bins), and a repair of O(bins) passes over two bins each.

    >>> partition(np.array([4, 3, 2, 2, 1]), 2).tolist()
    [0, 1, 1, 0, 1]
    """
    weights = np.asarray(weights, dtype=np.int64)
    sizes = weights if sizes is None else np.asarray(sizes, dtype=np.int64)
    nothing = np.zeros(bins, dtype=np.int64)
    loads, used = (nothing, nothing) if filled is None else filled
    total = int(sizes.sum() + used.sum())
    limit = total if capacity is None else min(capacity, total)
    if bins == 1:
        return np.zeros(len(weights), dtype=np.int64) if total <= limit else None
    order = np.lexsort((np.arange(len(weights)), -sizes, -weights))
    placed = _place(
        weights[order].tolist(), sizes[order].tolist(), loads.tolist(), used.tolist(), limit, total
    )
    if placed is None:
        return None
    bin_of = np.empty(len(weights), dtype=np.int64)
    bin_of[order] = placed
    repair(weights, sizes, bin_of, limit, filled=(loads, used))
    return bin_of


def _place(
    weights: list[int],
    sizes: list[int],
    loads: list[int],
    used_of: list[int],
    limit: int,
    total: int,
) -> list[int] | None:
    """Put each item, in the given order, into the lightest bin that has room for it.

    A bin is one integer, ``load | used | index`` from the high bits to the low, so that the
    heap compares machine words and adding an item is an addition. Bins without room for an
    item are set aside for it, and dropped once no remaining item fits.
    """
    bins = len(loads)
    index_bits = bins.bit_length()
    load_shift = index_bits + total.bit_length() + 1
    index_mask, used_mask = (1 << index_bits) - 1, (1 << (load_shift - index_bits)) - 1
    heap = [
        load << load_shift | used << index_bits | index
        for index, (load, used) in enumerate(zip(loads, used_of, strict=True))
    ]
    heapq.heapify(heap)
    placed = []
    least_left: list[int] | None = None  # smallest size among each item and its successors
    for item, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        added = (weight << load_shift) + (size << index_bits)
        key = heap[0] if heap else 0
        if heap and ((key >> index_bits) & used_mask) + size <= limit:
            heapq.heapreplace(heap, key + added)
            placed.append(key & index_mask)
            continue
        if least_left is None:
            least_left = list(itertools.accumulate(reversed(sizes), min))[::-1]
        aside = []
        while heap and ((heap[0] >> index_bits) & used_mask) + size > limit:
            key = heapq.heappop(heap)
            if ((key >> index_bits) & used_mask) + least_left[item] <= limit:
                aside.append(key)
        if not heap:
            return None
        key = heapq.heapreplace(heap, heap[0] + added)
        placed.append(key & index_mask)
        for key in aside:
            heapq.heappush(heap, key)
    return placed


def repair(
    weights: Ints, sizes: Ints, bin_of: Ints, limit: int, *, filled: tuple[Ints, Ints]
) -> None:
    """Move or swap items between the heaviest and one of the lightest bins while that helps.

    ``bin_of`` is changed in place; ``filled`` is the weight and size of what else each bin holds.
    """
    bins = len(filled[0])
    loads = np.bincount(bin_of, weights, bins).astype(np.int64) + filled[0]
    used = np.bincount(bin_of, sizes, bins).astype(np.int64) + filled[1]
    bound = max(largest_bin_bound(weights, bins), -(-int(loads.sum()) // bins))
    members = np.split(
        np.argsort(bin_of, kind="stable"), np.cumsum(np.bincount(bin_of, minlength=bins))[:-1]
    )
    for _ in range(4 * bins + 16):
        high = int(loads.argmax())
        if loads[high] <= bound:
            return
        exchange, low = None, high
        for partner in _lightest(loads).tolist():
            low, spread = partner, int(loads[high] - loads[partner])
            if spread <= 1:
                return
            exchange = _best_exchange(
                weights,
                sizes,
                members[high],
                members[low],
                spread,
                take_limit=limit - int(used[low]),
                give_limit=limit - int(used[high]),
            )
            if exchange is not None:
                break
        if exchange is None:
            return
        giver, taker = exchange
        moved, size = int(weights[giver]), int(sizes[giver])
        bin_of[giver] = low
        members[high] = members[high][members[high] != giver]
        members[low] = np.append(members[low], giver)
        if taker is not None:
            moved, size = moved - int(weights[taker]), size - int(sizes[taker])
            bin_of[taker] = high
            members[low] = members[low][members[low] != taker]
            members[high] = np.append(members[high], taker)
        loads[high] -= moved
        loads[low] += moved
        used[high] -= size
        used[low] += size


def _lightest(loads: Ints) -> Ints:
    """The bins with which repair tries an exchange, lightest first."""
    if len(loads) <= _PARTNERS:
        return np.argsort(loads, kind="stable")
    most = np.partition(loads, _PARTNERS - 1)[_PARTNERS - 1]
    few = np.flatnonzero(loads <= most)
    return few[np.argsort(loads[few], kind="stable")][:_PARTNERS]


def _best_exchange(
    weights: Ints,
    sizes: Ints,
    givers: Ints,
    takers: Ints,
    spread: int,
    *,
    take_limit: int,
    give_limit: int,
) -> tuple[int, int | None] | None:
    """The item to give, and the one to take in return (or None), that best halve the spread.

    Tries each item of the heavy bin against nothing and against the two items of the light bin
    nearest to the wanted difference.
    """
    takers = takers[np.lexsort((takers, weights[takers]))]
    back = np.concatenate(([0], weights[takers]))  # first stands for nothing
    back_size = np.concatenate(([0], sizes[takers]))
    given = weights[givers][:, None]
    at = np.searchsorted(weights[takers], weights[givers] - spread / 2)
    choice = np.stack([np.zeros_like(at), at, np.minimum(at + 1, len(takers))], axis=1)
    shift = given - back[choice]
    shift_size = sizes[givers][:, None] - back_size[choice]
    helps = (shift > 0) & (shift < spread) & (shift_size <= take_limit)
    helps &= -shift_size <= give_limit
    if not helps.any():
        return None
    miss = np.where(helps, np.abs(2 * shift - spread), np.iinfo(np.int64).max)
    row, column = np.unravel_index(int(miss.argmin()), miss.shape)
    taken = int(choice[row, column])
    return int(givers[row]), None if taken == 0 else int(takers[taken - 1])


def karmarkar_karp(weights: Ints, bins: int) -> Ints:
    """Give each item a bin by the largest differencing method.

    Repeatedly joins the two partial answers whose bins differ most, the heavy bins of one
    with the light bins of the other. Better than LPT when a bin holds few items; slower, and
    it knows no capacity.

    Args:
        weights: Weight of each item, >= 0.
        bins: Number of bins, >= 1.

    Returns:
        The bin of each item.

    Cost: O(n (log n + bins log bins)).

    >>> karmarkar_karp(np.array([8, 7, 6, 5, 4]), 2).tolist()
    [0, 1, 1, 0, 1]
    """
    weights = np.asarray(weights, dtype=np.int64)
    bin_of = np.zeros(len(weights), dtype=np.int64)
    if not len(weights):
        return bin_of
    # A node holds its bins' sums, heaviest first, minus the smallest; its two children; and
    # for each of its bins the bin of each child.
    sums: list[Ints] = [np.append(w, np.zeros(bins - 1, dtype=np.int64)) for w in weights]
    below: list[tuple[int, int, Ints] | None] = [None] * len(weights)
    heap = [(-int(weight), node) for node, weight in enumerate(weights)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, one), (_, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = sums[one] + sums[other][::-1]
        order = np.argsort(-joined, kind="stable")
        joined = joined[order] - joined.min()
        sums.append(joined)
        below.append((one, other, order))
        heapq.heappush(heap, (-int(joined[0]), len(sums) - 1))
    stack = [(heap[0][1], np.arange(bins))]
    while stack:
        node, bins_of_node = stack.pop()
        parts = below[node]
        if parts is None:
            bin_of[node] = bins_of_node[0]
            continue
        one, other, order = parts
        of_one = np.empty(bins, dtype=np.int64)
        of_one[order] = bins_of_node
        stack += [(one, of_one), (other, of_one[::-1])]
    return bin_of
