"""The copies that every plan needs whose fullest rank is as low, whatever writes it.

What it decides
    Ranks above the target are *givers*, with an excess; a rank below it has a room, and fills no
    more of it than its slots hold of the largest expert.

    *By receivers*: each copy adds at most the largest expert's rows, up to the target. So there are
    at least n copies, where the n largest such additions hold all excess.

    *By givers*: each copy takes at most the largest expert of its owner, or a target's worth.

    *By groups*: copies join ranks to groups, and n ranks are joined by n - 1 copies or more. The
    rooms of a group hold its excess::

        excess   3   2   4      groups   3, 2 of 5      4 of 3, 1
        rooms    5   3   1      copies   2 for 3 ranks  2 for 3 ranks

    A group has at least the largest of the three, and the best division into groups is a bound of
    all plans. Up to 16 ranks it is found exactly. Beyond that, each giver is taken to have the
    largest rooms to itself: of groups joined to one, the n rooms that hold both are, with one more
    copy, as many as hold each, since rooms are taken from the largest on.

    *By weights*, where groups are too many to be tried: a weight of each rank, such that every
    group that can be weighs 1 or more, bounds their number by the sum of all weights. The least
    such sum is a linear program with a row for every group. Rows are found as they are needed: the
    lightest group of given weights is a knapsack, solved exactly for each of a few sizes of the
    group's largest expert, which is all that a slot of its ranks can take. Weights for which no
    group is below 1 are a proof, and so are any once they are divided by the lightest group's.

Kept true (tests/unit/balance/expert/test_fewest.py)
    No plan of a small case has fewer copies than any bound, by trying all; groups are the best of
    all.

Sources
    Fewest transfers that settle debts, by groups that settle among themselves: T. Verhoeff,
    "Settling multiple debts efficiently", 2004. Programs whose rows are found as needed: Gilmore
    and Gomory, Operations Research 9, 1961. The bounds are derived here.
"""

import math

import numpy as np

from equipoise.balance.expert.loops import join_groups
from equipoise.balance.expert.request import ExpertRequest
from equipoise.base.arrays import Floats, Ints
from equipoise.schedule.compiled import run_loop
from equipoise.schedule.expert.schedule import add_by

_MOST_JOINED = 16
"""Ranks whose groups are tried: 3^15 divisions take 50 ms, compiled."""


def fewest_copies(request: ExpertRequest, target: int) -> int:
    """Copies in any plan whose fullest rank computes at most ``target`` rows.

    Args:
        request: For its owners, loads and slots.
        target: Rows of a rank, at most.
    """
    heights = add_by(request.owners, request.loads, request.ranks)
    excess, rooms = np.maximum(heights - target, 0), np.maximum(target - heights, 0)
    if not excess.any():
        return 0
    largest = max(int(request.loads.max()), 1)
    nth = np.arange(max(1, request.slots))[:, np.newaxis]
    additions = np.clip(rooms - nth * largest, 0, largest)
    arcs = np.zeros_like(excess)
    for rank in np.flatnonzero(excess).tolist():
        most = min(target, int(request.loads[request.owners == rank].max()))
        arcs[rank] = -(-int(excess[rank]) // max(most, 1))
    joined = np.flatnonzero(excess + additions[0])
    if len(joined) <= _MOST_JOINED and excess.sum() <= additions.sum():
        return _join(excess[joined], arcs[joined], additions[:, joined])
    alone = _cover(excess[excess > 0], additions.sum(axis=0))
    receivers = _cover(excess.sum(keepdims=True), additions.reshape(-1))
    return int(max(arcs.sum(), alone.sum(), receivers[0]))


def _join(excess: Ints, arcs: Ints, additions: Ints) -> int:
    """Copies of the best groups.

    Args:
        excess: Of each rank, int64 [ranks].
        arcs: Copies that each gives at least, int64 [ranks].
        additions: What each slot of a rank can take, int64 [slots, ranks]; together the excess.
    """
    ranks = len(excess)
    order = np.argsort(-additions, axis=None, kind="stable")
    costs, fewest = np.zeros((2, 1 << ranks), dtype=np.int64)
    tables = excess - additions.sum(axis=0), arcs, order % ranks, additions.reshape(-1)[order]
    return run_loop(join_groups, 3**ranks, *tables, costs, fewest)


def _cover(excess: Ints, rooms: Ints) -> Ints:
    """How many of the largest rooms hold each excess, int64 [givers]; one more than all if none."""
    held = np.cumsum(np.sort(rooms)[::-1])
    return np.asarray(np.searchsorted(held, excess) + 1)


_LEVELS = 8
"""Sizes of a group's largest expert that are told apart; between two, the larger one counts."""
_FINEST = 8192
"""Steps in which rows are counted; more rows are rounded, in favour of groups."""
_ROUNDS = 150


def joined_copies(request: ExpertRequest, target: int, *, rounds: int = _ROUNDS) -> int:
    """Copies in any plan whose fullest rank computes at most ``target`` rows.

    Args:
        request: For its owners, loads and slots.
        target: Rows of a rank, at most.
        rounds: Most linear programs; fewer may prove less.

    Cost: seconds for 64 ranks.
    """
    known = fewest_copies(request, target)
    loads, ranks = request.loads, request.ranks
    gaps = target - add_by(request.owners, loads, ranks)
    if not (gaps < 0).any():
        return known
    largest = np.array([int(loads[request.owners == rank].max()) for rank in range(ranks)])
    groups = _most_groups(gaps, largest, request.slots, rounds)
    return max(known, ranks - groups)


def _most_groups(gaps: Ints, largest: Ints, slots: int, rounds: int) -> int:
    """Groups of which each holds its own rows, at most."""
    from scipy.optimize import linprog

    ranks = len(gaps)
    tables = _rooms(gaps, largest, slots)
    ones = np.ones(ranks)
    rows = [*np.eye(ranks)[gaps >= 0], ones]
    best, proven = ones, float(ranks)  # a group has a rank
    for _ in range(rounds):
        answer = linprog(ones, A_ub=-np.array(rows), b_ub=-np.ones(len(rows)), bounds=(None, None))
        if answer.status or math.floor(proven) <= math.floor(answer.fun + 1e-6):
            break
        count = len(rows)
        for share in (0.5, 1.0):  # between the last proof and the program's weights, then these
            weights = share * answer.x + (1 - share) * best
            groups = [_lightest(weights, table) for table in tables]
            lightest = min(weight for weight, _ in groups)
            if lightest > 0 and (total := float(weights.sum()) / min(1.0, lightest)) < proven:
                best, proven = weights / min(1.0, lightest), total
            for weight, members in groups:
                if weight < 1 - 1e-7:
                    rows.append(np.isin(np.arange(ranks), members).astype(np.float64))
            if len(rows) > count:
                break
        if len(rows) == count:
            break
    return math.floor(proven + 1e-6)


def _rooms(gaps: Ints, largest: Ints, slots: int) -> list[Ints]:
    """What ranks of a group can take, or below 0 must give, by the group's largest expert.

    Each is int64 [3, ranks that such a group may have]: ranks, those that take most first; rows in
    steps; and whether a rank has such an expert, as one of the group must.
    """
    edges = np.unique(np.quantile(largest, np.arange(1, _LEVELS + 1) / _LEVELS, method="higher"))
    step = max(1, -(-int(-gaps[gaps < 0].sum()) // _FINEST))
    tables, below = [], -1
    for edge in edges.tolist():
        ranks = np.flatnonzero(largest <= edge)
        rooms = -(-np.minimum(gaps[ranks], slots * edge) // step)  # towards more room
        order = np.argsort(-rooms, kind="stable")
        tables.append(np.stack((ranks, rooms, largest[ranks] > below))[:, order])
        below = edge
    return tables


_LEFT, _EMPTY = -2, -1
"""A rank that is not taken, and one that is the first of its group."""


def _lightest(weights: Floats, table: Ints) -> tuple[float, list[int]]:
    """The lightest group whose rooms hold what its ranks must give, and its ranks.

    Those that take come first, so a sum of rooms only falls once it falls, and beyond all that can
    be given sums are alike. Sums are kept twice: of groups without a rank that has an expert of the
    table's size, and of groups with one.
    """
    ranks, rooms, has = table
    size = int(-rooms[rooms < 0].sum()) + 1
    best = np.full((2, size), np.inf)
    index = np.arange(2 * size, dtype=np.int64).reshape(2, size)
    came = np.full((len(ranks), 2, size), _LEFT, dtype=np.int64)
    for at, (rank, room) in enumerate(zip(ranks.tolist(), rooms.tolist(), strict=True)):
        lighter = best.argmin(axis=0)
        either = best.min(axis=0), np.where(lighter == 0, index[0], index[1])
        for kind in (1,) if has[at] else (0, 1):
            before = either if has[at] else (best[kind], index[kind])
            added, origin = _take(*before, room, begins=bool(has[at]) or kind == 0)
            added += weights[rank]
            is_lighter = added < best[kind]
            came[at, kind] = np.where(is_lighter, origin, _LEFT)
            best[kind] = np.where(is_lighter, added, best[kind])
    end = int(best[1].argmin())
    return float(best[1, end]), _trace(ranks, came.reshape(len(ranks), -1), size + end)


def _take(best: Floats, index: Ints, room: int, *, begins: bool) -> tuple[Floats, Ints]:
    """The lightest groups by their sum once a rank is among them, and what each was before.

    Without that rank's own weight; ``begins`` lets it be the first of a group.
    """
    size = len(best)
    added, origin = np.full(size, np.inf), np.full(size, _EMPTY, dtype=np.int64)
    if room < 0:
        added[:room], origin[:room] = best[-room:], index[-room:]
        return added, origin
    fits = max(0, size - room)
    added[size - fits :], origin[size - fits :] = best[:fits], index[:fits]
    if fits < size:
        last = fits + int(best[fits:].argmin())
        if best[last] < added[-1]:
            added[-1], origin[-1] = best[last], index[last]
    alone = min(room, size - 1)
    if begins and added[alone] > 0.0:
        added[alone], origin[alone] = 0.0, _EMPTY
    return added, origin


def _trace(ranks: Ints, came: Ints, end: int) -> list[int]:
    """The ranks of a group, by how each sum came about."""
    members = []
    for at in range(len(ranks) - 1, -1, -1):
        origin = int(came[at, end])
        if origin != _LEFT:
            members.append(int(ranks[at]))
            if origin == _EMPTY:
                break
            end = origin
    return members
