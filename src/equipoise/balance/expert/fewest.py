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

Kept true (tests/unit/balance/expert/test_fewest.py)
    No plan of a small case has fewer copies, by trying all; groups are the best of all.

Sources
    Fewest transfers that settle debts, by groups that settle among themselves: T. Verhoeff,
    "Settling multiple debts efficiently", 2004. The bounds are derived here.
"""

import numpy as np

from equipoise.balance.expert.loops import join_groups
from equipoise.balance.expert.request import ExpertRequest
from equipoise.base.arrays import Ints
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
