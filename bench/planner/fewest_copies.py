"""The fewest copies of any plan as even, proven by an integer program, beside those of ``exact``.

``balance.expert.fewest`` knows nothing of single experts but the largest. Here an integer program
has a variable for each expert and rank: whether the rank holds a copy, and of how many rows. What
HiGHS proves within its time is a bound of every plan; ``best`` is the fewest that it found, where
it found any. The larger of both bounds is ``proven``.
"""

import json
import math
import sys
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from bench.lib.stamp import environment
from equipoise.balance.expert.fewest import fewest_copies
from equipoise.balance.expert.policies import plan_experts
from equipoise.balance.expert.request import ExpertRequest
from equipoise.balance.expert.workload import workload
from equipoise.schedule.expert.schedule import add_by

SIZES, KINDS = ((64, 8), (128, 16)), ("W1", "W2", "W5", "W6", "W7")
SLOTS = (1, 2)
SEEDS, ROWS, LIMIT_S = 3, 65_536, 5.0


def proven_copies(request: ExpertRequest, target: int) -> tuple[int, float]:
    """Copies below which no plan lowers every rank to the target, and the fewest found."""
    loads, owners, ranks = request.loads, request.owners, request.ranks
    expert, rank = np.nonzero(loads[:, np.newaxis] * (owners[:, np.newaxis] != np.arange(ranks)))
    count, at = len(expert), np.arange(len(expert))
    most = np.minimum(loads[expert], target).astype(np.float64)
    ones = np.ones(count)
    # Rows of a copy that is made; rows of an expert; rows and copies of a rank.
    rows = [at, at, count + expert, count + len(loads) + rank, count + len(loads) + owners[expert]]
    columns = [at, count + at, at, at, at]
    values = [ones, -most, ones, ones, -ones]
    first = count + len(loads) + ranks
    rows, columns, values = [*rows, first + rank], [*columns, count + at], [*values, ones]
    entries = np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))
    table = coo_array(entries, shape=(first + ranks, 2 * count)).tocsr()
    room = target - add_by(owners, loads, ranks)
    upper = np.concatenate((np.zeros(count), loads, room, np.full(ranks, request.slots)))
    answer = milp(
        np.concatenate((np.zeros(count), ones)),
        constraints=LinearConstraint(table, -np.inf, upper),
        integrality=np.concatenate((np.zeros(count), ones)),
        bounds=Bounds(0, np.concatenate((most, ones))),
        options={"time_limit": LIMIT_S},
    )
    dual = answer.mip_dual_bound
    proven = 0 if dual is None or not math.isfinite(dual) else math.ceil(dual - 1e-6)
    best = math.nan if answer.fun is None else round(answer.fun)
    return max(proven, fewest_copies(request, target)), best


def _case(experts: int, ranks: int, slots: int, kind: str) -> dict[str, Any]:
    copies, proven, best = 0, 0, 0.0
    for seed in range(SEEDS):
        drawn = workload(kind, seed, 3, ranks=ranks, experts=experts, rows_per_rank=ROWS // ranks)
        request = ExpertRequest(drawn, slots=slots)
        schedule = plan_experts("exact", request)
        bound, reached = proven_copies(request, int(schedule.computed.max()))
        copies, proven, best = copies + schedule.copies, proven + bound, best + reached
    return {
        "copies": copies,
        "proven": proven,
        "best": None if math.isnan(best) else best,
        "over_proven": copies / proven if proven else 1.0,
    }


def measure() -> dict[str, Any]:
    """Every size, number of slots and workload."""
    cases = {
        f"{x} experts, {r} ranks, {s} slots": {kind: _case(x, r, s, kind) for kind in KINDS}
        for x, r in SIZES
        for s in SLOTS
    }
    return {"bench": "planner.fewest_copies", "environment": environment(), "cases": cases}


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
    sys.stdout.write("\n")
