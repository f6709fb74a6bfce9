"""Packs of whole documents under a token cap: micro-batches of different lengths.

What it decides
    ``by-tokens``  equal token counts: best-fit decreasing at the smallest cap that fits.
    ``by-work``    equal predicted seconds, at most ``max_tokens`` a micro-batch.

Sources
    Packing by work under a token cap: WLB-LLM, arXiv:2503.17924, section 4.1.
    Best fit under a bisected cap: Coffman, Garey and Johnson, "An application of bin-packing
    to multiprocessor scheduling" (MULTIFIT), 1978.
"""

import bisect
from collections.abc import Callable

import numpy as np

from equipoise.balance.bound import largest_bin_bound
from equipoise.balance.packing.whole_turns import even_turns
from equipoise.balance.partition import partition
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import LoadCurve
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces, lengths_of
from equipoise.spec.run.spec import PackSpec

Placer = Callable[[Ints, int, int], Ints | None]
"""From item sizes, bins and capacity [tokens] to the bin of each item."""


def pack_by_tokens(pieces: Pieces, pack: PackSpec, ranks: int, curve: LoadCurve) -> PackedStep:
    """Whole pieces to ranks and micro-batches of nearly equal token counts."""
    del curve
    sizes = lengths_of(pieces)
    return _pack_whole("by-tokens", pieces, sizes, pack, ranks)


def pack_by_work(
    pieces: Pieces,
    pack: PackSpec,
    ranks: int,
    curve: LoadCurve,
    *,
    meets_each_turn: bool = False,
) -> PackedStep:
    """Whole pieces to ranks and micro-batches of nearly equal predicted seconds.

    Where ranks meet in each micro-batch, turns come out even as well.
    """
    loads = curve.pieces_ns(pieces)
    return _pack_whole("by-work", pieces, loads, pack, ranks, meets_each_turn=meets_each_turn)


def require_whole(pieces: Pieces, pack: PackSpec, ranks: int, policy: str) -> None:
    """Refuse a step whose documents cannot be packed whole.

    Raises:
        LayoutError: fewer documents than ranks, or a document over the cap.
    """
    sizes, cap = lengths_of(pieces), pack.most_tokens
    if len(pieces) < ranks:
        fewer = f"layout.dp = {len(pieces)}, or " if len(pieces) else ""
        raise LayoutError(
            f"A step of {int(sizes.sum()):,} tokens holds {len(pieces)} documents for {ranks} "
            f"ranks, and {policy} packs whole documents. Smallest changes that fit: "
            f"{fewer}a larger pack.step_tokens."
        )
    if int(sizes.max()) > cap:
        raise LayoutError(
            f"A document of {int(sizes.max()):,} tokens is over the {cap:,} tokens that one "
            f"micro-batch may hold. Set pack.max_tokens = {int(sizes.max())}, or a smaller "
            f"pack.context_tokens."
        )


def _pack_whole(
    policy: str,
    pieces: Pieces,
    loads: Ints,
    pack: PackSpec,
    ranks: int,
    *,
    meets_each_turn: bool = False,
) -> PackedStep:
    require_whole(pieces, pack, ranks, policy)
    sizes, cap = lengths_of(pieces), pack.most_tokens
    turns = -(-int(sizes.sum()) // (ranks * pack.context_tokens))
    while True:
        cell_of = _even_ranks(loads, sizes, ranks, turns, cap)
        if meets_each_turn and min(ranks, turns) > 1:
            cell_of = even_turns(loads, sizes, ranks, turns, cap, cell_of)
        if cell_of is not None:
            return PackedStep(
                policy,
                tuple(
                    tuple(
                        MicroBatch(pieces[cell_of == turn * ranks + rank]) for turn in range(turns)
                    )
                    for rank in range(ranks)
                ),
            )
        turns += 1


def _even_ranks(loads: Ints, sizes: Ints, ranks: int, turns: int, cap: int) -> Ints | None:
    """Balance ranks first, because they wait for each other; then each rank's micro-batches.

    Returns:
        The micro-batch of each document, ``turn x ranks + rank``.
    """
    rank_of = place_under_cap(loads, sizes, ranks, turns * cap)
    if rank_of is None:
        return None
    cell_of = np.empty_like(rank_of)
    for rank in range(ranks):
        mine = np.flatnonzero(rank_of == rank)
        batch_of = place_under_cap(loads[mine], sizes[mine], turns, cap)
        if batch_of is None:
            return None
        # Heaviest first on every rank, so that micro-batches of one turn are alike.
        work = np.bincount(batch_of, loads[mine], turns)
        turn_of = np.empty(turns, dtype=np.int64)
        turn_of[np.lexsort((np.arange(turns), -work))] = np.arange(turns)
        cell_of[mine] = turn_of[batch_of] * ranks + rank
    return cell_of


def place_under_cap(loads: Ints, sizes: Ints, bins: int, cap: int) -> Ints | None:
    """Even loads under a token cap. Falls back to even tokens; None if that fails too."""
    if loads is not sizes:
        bin_of = partition(loads, bins, sizes=sizes, capacity=cap)
        if bin_of is not None:
            return bin_of
    return even_tokens(sizes, bins, cap)


def even_tokens(sizes: Ints, bins: int, cap: int) -> Ints | None:
    """Nearly equal token counts: the better of LPT and best fit at the smallest cap that fits."""
    longest_first = partition(sizes, bins, capacity=cap)
    bound = largest_bin_bound(sizes, bins)
    high = cap
    if longest_first is not None:
        high = int(np.bincount(longest_first, sizes, bins).max())
        if high * 1000 <= bound * 1001:
            return longest_first
    best, low = None, bound
    while low <= high:
        middle = (low + high) // 2
        bin_of = best_fit_decreasing(sizes, bins, middle)
        if bin_of is None:
            low = middle + 1
        else:
            best, high = bin_of, middle - 1
    return longest_first if best is None else best


def best_fit_decreasing(sizes: Ints, bins: int, capacity: int) -> Ints | None:
    """Put items, longest first, into the fullest bin with room; None if one finds none.

    >>> best_fit_decreasing(np.array([5, 4, 3, 2]), 2, 7).tolist()
    [0, 1, 1, 0]
    """
    free = [(capacity, index) for index in range(bins)]
    bin_of = np.zeros(len(sizes), dtype=np.int64)
    for item in np.lexsort((np.arange(len(sizes)), -sizes)).tolist():
        size = int(sizes[item])
        at = bisect.bisect_left(free, (size, -1))
        if at == len(free):
            return None
        room, index = free.pop(at)
        bisect.insort(free, (room - size, index))
        bin_of[item] = index
    return bin_of
