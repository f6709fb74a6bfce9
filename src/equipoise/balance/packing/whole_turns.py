"""Whole documents in micro-batches that are even turn by turn, for ranks that meet in each one.

Why
    If every micro-batch holds a collective over data-parallel ranks, a turn takes as long as its
    heaviest micro-batch. Equal sums per rank are then not enough::

        rank 0   9 1         both sums are 10, and the turns take 9 + 9;
        rank 1   1 9         with rank 1's two swapped they take 9 + 1

What it decides
    The micro-batch of each document: turn and rank.

    1. A document heavier than an even micro-batch sets its turn's height. The next heaviest go
       beside it, and every rank is filled up to that height, longest first, as far as the token
       cap allows.
    2. Once no document stands out, the rest is shared evenly.
    3. Within a turn the heaviest rank exchanges documents with the others; then each turn's
       micro-batches are assigned to ranks so that sums over turns come out even as well.

    An even share over all micro-batches and the caller's own answer compete with this.

Kept true (tests/unit/balance/packing/test_whole_turns.py, by Hypothesis)
    Each document appears once; the cap holds; turns in sum never take longer than the caller's
    answer; the answer depends on the arguments alone.

Sources
    Shelves as high as their first item: Coffman, Garey, Johnson and Tarjan, "Performance bounds
    for level-oriented two-dimensional packing algorithms", 1980.
"""

import numpy as np

from equipoise.balance.partition import partition, repair
from equipoise.base.arrays import Ints


def turns_ns(cell_of: Ints, loads: Ints, ranks: int, turns: int) -> int:
    """Sum of each turn's heaviest micro-batch.

    Document i is in micro-batch ``cell_of[i] = turn x ranks + rank``.

    >>> turns_ns(np.array([0, 1, 2, 3]), np.array([9, 1, 1, 9]), ranks=2, turns=2)
    18
    """
    work = np.bincount(cell_of, loads, ranks * turns).astype(np.int64)
    return int(work.reshape(turns, ranks).max(1).sum())


def even_turns(
    loads: Ints, sizes: Ints, ranks: int, turns: int, cap: int, known: Ints | None
) -> Ints | None:
    """Give each document a turn and a rank so that the sum of turns is small.

    Args:
        loads: Load of each document.
        sizes: Tokens of each document.
        ranks: Ranks that meet in each turn.
        turns: Micro-batches of each rank.
        cap: Most tokens of a micro-batch.
        known: An answer to improve on, if there is one.

    Returns:
        The micro-batch of each document, ``turn x ranks + rank``; None if none fits.

    Cost: O(documents x ranks), and two partitions over ``ranks x turns`` micro-batches.

    >>> loads = np.array([9, 9, 1, 1])
    >>> even_turns(loads, loads, ranks=2, turns=2, cap=10, known=None).tolist()
    [0, 1, 2, 3]
    """
    answers = [] if known is None else [known]
    for shelves in (turns - 1, 0):
        cell_of = _on_shelves(loads, sizes, ranks, turns, cap, shelves)
        if cell_of is not None:
            answers.append(_settle(cell_of, loads, sizes, ranks, turns, cap))
    if not answers:
        return None
    return min(answers, key=lambda cell_of: turns_ns(cell_of, loads, ranks, turns))


def _on_shelves(
    loads: Ints, sizes: Ints, ranks: int, turns: int, cap: int, shelves: int
) -> Ints | None:
    """Fill the first turns up to the height of their heaviest document; share the rest evenly."""
    cell_of = np.zeros(len(loads), dtype=np.int64)
    left = np.lexsort((np.arange(len(loads)), -loads))
    turn = 0
    while turn < shelves and len(left):
        height, cells = int(loads[left[0]]), ranks * (turns - turn)
        if height * cells <= int(loads[left].sum()):
            break
        rank_of = _fill(loads[left], sizes[left], ranks, cap, height)
        is_placed = rank_of >= 0
        cell_of[left[is_placed]] = turn * ranks + rank_of[is_placed]
        left, turn = left[~is_placed], turn + 1
    rest = partition(loads[left], ranks * (turns - turn), sizes=sizes[left], capacity=cap)
    if rest is None:
        return None
    cell_of[left] = turn * ranks + rest
    return cell_of


def _fill(loads: Ints, sizes: Ints, ranks: int, cap: int, height: int) -> Ints:
    """Assign documents, heaviest first, to the lightest rank under height and cap; -1 if none."""
    rank_of = np.full(len(loads), -1, dtype=np.int64)
    gap = np.full(ranks, height, dtype=np.int64)
    room = np.full(ranks, cap, dtype=np.int64)
    smallest = -np.minimum.accumulate(sizes)  # ascending, as -loads is
    at = 0
    while at < len(loads):
        fits = (gap >= loads[at]) & (room >= sizes[at])
        if fits.any():
            rank = int(np.where(fits, gap, -1).argmax())
            rank_of[at] = rank
            gap[rank] -= loads[at]
            room[rank] -= sizes[at]
            at += 1
            continue
        # No document before this one is light and short enough for any rank.
        first = np.maximum(np.searchsorted(-loads, -gap), np.searchsorted(smallest, -room))
        at = max(at + 1, int(first.min()))
    return rank_of


def _settle(cell_of: Ints, loads: Ints, sizes: Ints, ranks: int, turns: int, cap: int) -> Ints:
    """Put similar micro-batches in one turn, repair each turn, and even out the ranks' sums."""
    work = np.bincount(cell_of, loads, ranks * turns).astype(np.int64)
    order = np.lexsort((np.arange(len(work)), -work))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    settled = place[cell_of]
    nothing = np.zeros(ranks, dtype=np.int64)
    of_rank = nothing.copy()
    for turn in range(turns):
        mine = np.flatnonzero(settled // ranks == turn)
        rank_of = settled[mine] % ranks
        repair(loads[mine], sizes[mine], rank_of, cap, filled=(nothing, nothing))
        work = np.bincount(rank_of, loads[mine], ranks).astype(np.int64)
        heaviest = np.lexsort((np.arange(ranks), -work))
        least = np.lexsort((np.arange(ranks), of_rank))
        given = np.empty_like(heaviest)
        given[heaviest] = least
        settled[mine] = turn * ranks + given[rank_of]
        of_rank[least] += work[heaviest]
    return settled
