"""The usual balancer, as the thing to beat: places from earlier loads, rows dealt evenly.

What it decides
    All ranks together have room for X experts and a copy for each slot. The expert with the most
    earlier rows for each of its places gets one more place until there is no room left. Places
    are then dealt to ranks, the heaviest first, each to the rank with the least that still has
    room. An expert may lie on no more than the ranks that others give it, and not on its owner at
    all: its weights then travel in every micro-batch. Its rows are dealt evenly to its places.

Kept true (tests/unit/balance/expert/test_policies.py)
    Even with the loads that it was planned on; far from it with loads that have changed.

Sources
    Expert parallelism load balancer, github.com/deepseek-ai/EPLB, ``rebalance_experts`` without
    groups of experts.
"""

import numpy as np

from equipoise.balance.expert.request import ExpertRequest, write_schedule
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.schedule.expert.schedule import ExpertSchedule


def eplb(request: ExpertRequest) -> ExpertSchedule:
    """Places by earlier loads; those of owners where there are none yet, or no rows.

    Raises:
        LayoutError: experts that ranks do not divide.
    """
    ranks, experts = request.rows.shape
    if experts % ranks:
        raise LayoutError(
            f"eplb gives every rank equally many places, but {ranks} ranks do not divide {experts} "
            f'experts. Give a number of ranks that does, or another policy, as "exact".'
        )
    seen = request.seen
    if seen is None or not seen.any() or not request.rows.any():
        places = np.stack((np.arange(experts), request.owners), axis=1)
    else:
        places = _places(seen, ranks, experts // ranks + request.slots)
    counts = np.bincount(places[:, 0], minlength=experts)
    nth = np.arange(len(places)) - (np.cumsum(counts) - counts)[places[:, 0]]
    parts = request.loads[places[:, 0]], counts[places[:, 0]]
    place_rows = parts[0] // parts[1] + (nth < parts[0] % parts[1])
    return write_schedule("eplb", request, places, place_rows.astype(np.int64))


def _places(seen: Ints, ranks: int, per_rank: int) -> Ints:
    """Expert and rank of every place, int64 [n, 2], ascending; an expert once on a rank."""
    counts = np.ones(len(seen), dtype=np.int64)
    for _ in range(ranks * per_rank - len(seen)):
        each = np.where(counts < ranks, seen / counts, -1.0)
        if each.max() < 0:
            break
        counts[int(each.argmax())] += 1
    expert = np.repeat(np.arange(len(seen)), counts)
    weight = (seen / counts)[expert]
    heights, room = np.zeros(ranks), np.full(ranks, per_rank)
    chosen = set[tuple[int, int]]()
    for at in np.argsort(-weight, kind="stable").tolist():
        holds = np.array([(int(expert[at]), rank) in chosen for rank in range(ranks)])
        open_ranks = np.flatnonzero((room > 0) & ~holds)
        if not len(open_ranks):  # only where it is already on every rank with room
            continue
        rank = int(open_ranks[heights[open_ranks].argmin()])
        chosen.add((int(expert[at]), rank))
        heights[rank] += weight[at]
        room[rank] -= 1
    return np.array(sorted(chosen), dtype=np.int64)
