"""Copies of the experts that were hot, sent before routers choose, and corrected once they have.

Why
    Weights that are sent before tokens have chosen travel while attention computes. Which experts
    will be hot is known only from earlier steps, so part of the copies may be wrong.

What it decides
    Copies for the loads seen before, scaled to this micro-batch's rows, in all slots but those
    kept for corrections. Then, with the counts at hand: how many rows each place computes, which
    costs nothing; and further copies, in the slots that are left, for what is above the target
    still. Where that does not suffice, half of the early copies give their slots to corrections,
    those with the fewest rows, and so on. Here all copies travel after the choice, so an early one
    that is given up costs nothing; sent before it, its bytes would be lost.

Kept true (tests/unit/balance/expert/test_policies.py)
    With loads that are 30% stale, max/mean stays below 1.10, where eplb's is above 1.3.

Sources
    Hecate (fully sharded sparse data parallelism, SparseAllGather, SparseReduceScatter),
    arXiv:2502.02581.
"""

import dataclasses

import numpy as np

from equipoise.balance.expert.bound import lower_bound
from equipoise.balance.expert.exact import Fill, plan_copies
from equipoise.balance.expert.loops import level
from equipoise.balance.expert.request import (
    ExpertRequest,
    first_places,
    heights_of,
    with_copies,
    write_schedule,
)
from equipoise.base.arrays import Ints
from equipoise.schedule.compiled import run_loop
from equipoise.schedule.expert.schedule import ExpertSchedule, add_by

_ENOUGH = 0.05
"""Share of the mean by which the fullest rank may exceed it before early copies are given up."""

_DROPS = 8
"""How often half of the early copies are given up."""


def hecate(request: ExpertRequest) -> ExpertSchedule:
    """Copies by earlier loads, quotas by the loads at hand, then corrections."""
    early = _early_copies(request)
    best, lowest = _corrected(request, early), -1
    enough = (1 + _ENOUGH) * request.loads.sum() / request.ranks
    for _ in range(_DROPS):
        lowest = int(best.computed.max())
        if lowest <= enough or not len(early):
            break
        # Those that compute most stay; the slots of the others are for corrections.
        early = early[np.argsort(-_rows_of(best, early), kind="stable")][: len(early) // 2]
        other = _corrected(request, early)
        best = other if int(other.computed.max()) < lowest else best
    return best


def _rows_of(schedule: ExpertSchedule, copies: Ints) -> Ints:
    """Rows that a schedule lets each copy compute."""
    ranks = schedule.ranks
    keys = schedule.places[:, 0] * ranks + schedule.places[:, 1]
    at = np.searchsorted(keys, copies[:, 0] * ranks + copies[:, 1])
    rows: Ints = schedule.loads[np.minimum(at, len(keys) - 1)]
    return rows


def _corrected(request: ExpertRequest, early: Ints) -> ExpertSchedule:
    """The loads at hand evened out over places that are there, and further copies."""
    loads = request.loads
    unused = np.column_stack((early[:, :2], np.zeros(len(early), dtype=np.int64)))
    places, place_rows = with_copies(request, loads, unused)
    heights = heights_of(request, places, place_rows)
    run_loop(
        level,
        len(places) ** 2,
        first_places(places, len(loads)),
        np.ascontiguousarray(places[:, 1]),
        place_rows,
        heights,
    )
    is_owner = request.owners[places[:, 0]] == places[:, 1]
    kept = np.ascontiguousarray(place_rows[is_owner])
    settled = np.column_stack((places[~is_owner], place_rows[~is_owner]))
    used = add_by(settled[:, 1], np.ones(len(settled), dtype=np.int64), request.ranks)
    start = Fill(request, kept, heights, used)
    kept, late = start.lowered(max(lower_bound(request, loads), start.tolerated))
    copies = _joined(np.concatenate((settled, late)))
    return write_schedule("hecate", request, *with_copies(request, kept, copies))


def _early_copies(request: ExpertRequest) -> Ints:
    """Copies by earlier loads alone."""
    slots = request.slots - request.slots // 2
    if request.seen is None or not request.seen.any() or not slots:
        return np.zeros((0, 3), dtype=np.int64)
    # In Python's numbers: a product of large loads is not an int64.
    seen, total = request.seen.tolist(), int(request.rows.sum())
    whole = sum(seen)
    expected = np.array([each * total // whole for each in seen], dtype=np.int64)
    _, copies = plan_copies(dataclasses.replace(request, slots=slots), expected)
    return copies


def _joined(copies: Ints) -> Ints:
    """Copies of the same expert on the same rank as one."""
    if not len(copies):
        return copies
    where, inverse = np.unique(copies[:, :2], axis=0, return_inverse=True)
    return np.column_stack((where, add_by(inverse.reshape(-1), copies[:, 2], len(where))))
