"""Which rank runs each sample in which of its micro-batches.

Why
    Ranks that meet in every micro-batch (FSDP, ZeRO 2 and 3, expert parallelism) wait for the
    heaviest one each time; ranks that meet at the step's end wait for the heaviest sum. A
    pipeline waits where the micro-batches of one rank differ.

What it decides
    A *cell* is a micro-batch of a rank, a *turn* is the cells that ranks run at the same time.

    ``cells_of_turns``  as if all cells were alike; then similar ones share a turn. If a
                        sample outweighs a cell, turns as high as these samples compete with that.
    ``cells_of_ranks``  ranks first, then each rank's own micro-batches.
    ``cells_of_own_turns``  the same, and each rank has as few of them as the limits allow.

Kept true (tests/unit/balance/batches/test_batch.py, by Hypothesis)
    Every unit has one cell; the limits hold; no cell is empty where there are enough units.
"""

import numpy as np
import numpy.typing as npt

from equipoise.balance.batches.bins import exchange, place, shelve
from equipoise.balance.packing.whole import even_tokens
from equipoise.base.arrays import Ints

CLOSE = 1.002
"""A heaviest rank this close to the mean needs no second way to share samples."""


def cells_of_turns(
    loads: Ints,
    sizes: Ints,
    limits: Ints,
    ranks: int,
    turns: int,
    *,
    may_be_empty: bool = False,
    turns_may_differ: bool = True,
) -> Ints | None:
    """Cells that are even turn by turn.

    Args:
        loads: Seconds of each unit in each phase, int64 [units, phases] [ns].
        sizes: What is limited in a micro-batch, int64 [units, limits].
        limits: Most of each size in a micro-batch, int64 [limits].
        ranks: Data-parallel ranks.
        turns: Micro-batches of each rank.
        may_be_empty: Whether cells may stay empty although there are enough units.
        turns_may_differ: Whether one turn may be higher than another, which shortens the sum of
            turns, but not a pipeline's step.

    Returns:
        The cell of each unit, ``turn x ranks + rank``; None if the limits leave no room.

    Cost: O(units x ranks x turns).
    """
    answers = []
    cells = fit(loads, sizes, limits, ranks * turns)
    if cells is not None:
        answers.append(_settle(cells, loads, sizes, limits, ranks, turns))
    whole = loads.sum(1)
    outweighs = int(whole.max()) * ranks * turns > int(whole.sum())
    if turns > 1 and turns_may_differ and outweighs:
        shelved = _on_shelves(loads, sizes, limits, ranks, turns)
        if shelved is not None:
            if not may_be_empty:
                _fill_empty(shelved, loads, ranks * turns)
            answers.append(_settle(shelved, loads, sizes, limits, ranks, turns))
    if not answers:
        return None
    return min(answers, key=lambda cell_of: turns_ns(cell_of, loads, ranks, turns))


def cells_of_ranks(
    loads: Ints,
    sizes: Ints,
    limits: Ints,
    ranks: int,
    turns: int,
    *,
    may_be_empty: bool = False,
) -> Ints | None:
    """Cells whose ranks are even in sum; then each rank's own micro-batches, heaviest first.

    Arguments and answer as in ``cells_of_turns``.
    """
    rank_of = fit(loads, sizes, limits * turns, ranks)
    if rank_of is None or turns == 1:
        return rank_of
    cell_of = np.empty_like(rank_of)
    for rank in range(ranks):
        mine = np.flatnonzero(rank_of == rank)
        if len(mine):
            turn_of = fit(loads[mine], sizes[mine], limits, turns)
            if turn_of is None:
                return None
            work = _sums(turn_of, loads[mine].sum(1, keepdims=True), turns)[:, 0]
            cell_of[mine] = _places(work)[turn_of] * ranks + rank
    if not may_be_empty:
        _fill_empty(cell_of, loads, ranks * turns)
    return cell_of


def cells_of_own_turns(
    loads: Ints,
    sizes: Ints,
    limits: Ints,
    ranks: int,
    least: int,
    step: int,
    *,
    may_be_empty: bool = False,
) -> tuple[Ints, Ints] | None:
    """Ranks that are even in sum, each with as few micro-batches as the limits allow.

    Args:
        loads: Seconds of each unit in each phase, int64 [units, phases] [ns].
        sizes: What is limited in a micro-batch, int64 [units, limits].
        limits: Most of each size in a micro-batch, int64 [limits].
        ranks: Data-parallel ranks.
        least: Fewest micro-batches of a rank.
        step: Number that divides each rank's micro-batches.
        may_be_empty: Whether micro-batches may be empty; if not, a rank with fewer units than
            micro-batches gets the lightest ones of ranks that can spare them.

    Returns:
        Micro-batches of each rank, int64 [ranks], and the cell of each unit; None if there are too
        few units.
    """
    rank_of = fit(loads, sizes, np.maximum(sizes.sum(0), 1), ranks)
    if rank_of is None:
        return None
    shares = [
        _own_turns(rank_of == rank, loads, sizes, limits, least, step) for rank in range(ranks)
    ]
    lightest = np.argsort(loads.sum(1), kind="stable")
    for moved in range(len(loads) + 1):
        spare = np.array([len(turn_of) - turns for turns, turn_of in shares])
        poor = int(spare.argmin())
        if may_be_empty or spare[poor] >= 0:
            break
        given = lightest[spare[rank_of[lightest]] > 0]
        if not len(given) or moved == len(loads):
            return None
        giver, rank_of[given[0]] = int(rank_of[given[0]]), poor
        for rank in (giver, poor):
            shares[rank] = _own_turns(rank_of == rank, loads, sizes, limits, least, step)
    cell_of = np.empty_like(rank_of)
    for rank, (_, turn_of) in enumerate(shares):
        cell_of[rank_of == rank] = turn_of * ranks + rank
    return np.array([turns for turns, _ in shares]), cell_of


def _own_turns(
    mine: npt.NDArray[np.bool_], loads: Ints, sizes: Ints, limits: Ints, least: int, step: int
) -> tuple[int, Ints]:
    """The fewest micro-batches of one rank, and the one of each of its units."""
    fewest = int((-(-sizes[mine].sum(0) // limits)).max())
    turns = -(-max(fewest, least) // step) * step
    if not mine.any():
        return turns, np.empty(0, dtype=np.int64)
    while (turn_of := fit(loads[mine], sizes[mine], limits, turns)) is None:
        turns += step
    return turns, turn_of


def turns_ns(cell_of: Ints, loads: Ints, ranks: int, turns: int) -> int:
    """Time of a step whose ranks meet in each micro-batch, phase by phase [ns].

    >>> turns_ns(np.array([0, 1, 2, 3]), np.array([[9], [1], [1], [9]]), ranks=2, turns=2)
    18
    """
    table = _sums(cell_of, loads, ranks * turns).reshape(turns, ranks, -1)
    return int(table.max(1).sum())


def ranks_ns(cell_of: Ints, loads: Ints, ranks: int, turns: int) -> int:
    """Time of a step whose ranks meet at the end of each phase [ns].

    >>> ranks_ns(np.array([0, 1, 2, 3]), np.array([[9], [1], [1], [9]]), ranks=2, turns=2)
    10
    """
    table = _sums(cell_of, loads, ranks * turns).reshape(turns, ranks, -1)
    return int(table.sum(0).max(0).sum())


def fit(loads: Ints, sizes: Ints, limits: Ints, bins: int) -> Ints | None:
    """Bins of even loads under the limits, or of even sizes, or best fit; None if that fails too.

    No bin is empty where there are enough units.
    """
    bin_of = place(loads, sizes, limits, bins)
    if bin_of is None:
        bin_of = place(sizes, sizes, limits, bins)
    if bin_of is None and len(limits) == 1:
        bin_of = even_tokens(sizes[:, 0], bins, int(limits[0]))
    if bin_of is not None:
        _fill_empty(bin_of, loads, bins)
        exchange(loads, sizes, limits, bin_of, bins)
    return bin_of


def _fill_empty(bin_of: Ints, loads: Ints, bins: int) -> None:
    """Give each empty bin the lightest unit that is not the only one of its bin; in place."""
    counts = np.bincount(bin_of, minlength=bins)
    empty = np.flatnonzero(counts == 0)
    if not len(empty) or len(loads) < bins:
        return
    lightest = iter(np.argsort(loads.sum(1), kind="stable").tolist())
    for each in empty.tolist():
        moved = next(unit for unit in lightest if counts[bin_of[unit]] > 1)
        counts[bin_of[moved]] -= 1
        bin_of[moved] = each


def _on_shelves(loads: Ints, sizes: Ints, limits: Ints, ranks: int, turns: int) -> Ints | None:
    cell_of, filled = shelve(loads.sum(1), sizes, limits, ranks, turns)
    left = np.flatnonzero(cell_of < 0)
    if len(left):
        rest = fit(loads[left], sizes[left], limits, ranks * (turns - filled))
        if rest is None:
            return None
        cell_of[left] = filled * ranks + rest
    return cell_of


def _settle(cell_of: Ints, loads: Ints, sizes: Ints, limits: Ints, ranks: int, turns: int) -> Ints:
    """Put similar cells in one turn, even out each turn, then the ranks' sums over turns."""
    whole = loads.sum(1, keepdims=True)
    settled = _places(_sums(cell_of, whole, ranks * turns)[:, 0])[cell_of]
    sums = np.zeros(ranks, dtype=np.int64)
    turn_of = settled // ranks
    for turn in range(turns):
        mine = np.flatnonzero(turn_of == turn)
        rank_of = settled[mine] % ranks
        if turns > 1:
            exchange(loads[mine], sizes[mine], limits, rank_of, ranks)
        work = _sums(rank_of, whole[mine], ranks)[:, 0]
        given = np.empty(ranks, dtype=np.int64)
        heaviest = np.argsort(-work, kind="stable")
        given[heaviest] = np.argsort(sums, kind="stable")
        settled[mine] = turn * ranks + given[rank_of]
        sums[given] += work
    return settled


def _places(work: Ints) -> Ints:
    """The place of each bin in falling order of its work."""
    places = np.empty(len(work), dtype=np.int64)
    places[np.argsort(-work, kind="stable")] = np.arange(len(work))
    return places


def _sums(bin_of: Ints, loads: Ints, bins: int) -> Ints:
    """Sum of each cost in each bin, int64 [bins, costs]."""
    sums = np.zeros((bins, loads.shape[1]), dtype=np.int64)
    np.add.at(sums, bin_of, loads)
    return sums
