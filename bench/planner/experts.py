"""Planning of experts: how even, how many copies over their bound, how long it takes.

Exact loads: every workload at three sizes and one or two slots, ten seeds each. Stale loads: 30% of
the rows have moved to other experts since the loads that history-based policies saw. Copies are
bytes: all experts of a layer have the same size. ``over_bound`` is the sum of copies over the sum
of the fewest that any plan as even needs; ``gap`` the fullest rank over the lowest that slots
allow, which is above the mean where half of the experts are empty (W5). Times are of one planning
call in one thread, compiled, medians of calls that alternate between seeds.
"""

import json
import statistics
import sys
import time

import numpy as np

from bench.lib.stamp import LoadStamp, environment
from equipoise.balance.expert.bound import lower_bound
from equipoise.balance.expert.fewest import fewest_copies, joined_copies
from equipoise.balance.expert.loops import fill, level, share
from equipoise.balance.expert.policies import EXPERT_POLICIES, plan_experts
from equipoise.balance.expert.request import ExpertRequest
from equipoise.balance.expert.workload import WORKLOADS, popularity, workload
from equipoise.schedule.compiled import compile_loop
from equipoise.schedule.expert.check import check_experts
from equipoise.schedule.expert.schedule import owners_of

SIZES = ((64, 8), (128, 16), (256, 64))
SEEDS, ROWS, REPEATS = 10, 65_536, 5


def _exact(experts: int, ranks: int, slots: int, kind: str) -> dict[str, float]:
    skews, gaps, copies, fewest, times = [], [], 0, 0, []
    for seed in range(SEEDS):
        rows = workload(kind, seed, 3, ranks=ranks, experts=experts, rows_per_rank=ROWS // ranks)
        request = ExpertRequest(rows, slots=slots)
        for _ in range(REPEATS):
            began = time.perf_counter()
            schedule = plan_experts("exact", request)
            times.append(time.perf_counter() - began)
        check_experts(schedule, slots=slots)
        top = int(schedule.computed.max())
        skews.append(schedule.skew)
        gaps.append(top / lower_bound(request, request.loads) - 1)
        copies += schedule.copies
        known = fewest_copies(request, top)
        # A linear program takes seconds: where plans are near the bound, it is not needed.
        fewest += known if schedule.copies <= 1.1 * known else joined_copies(request, top)
    return {
        "worst_skew": max(skews),
        "worst_gap": max(gaps),
        "copies": copies / SEEDS,
        "over_bound": copies / fewest if fewest else 1.0,
        "plan_s": statistics.median(times),
    }


def _stale(experts: int, ranks: int, slots: int) -> dict[str, dict[str, float]]:
    skews: dict[str, list[float]] = {name: [] for name in EXPERT_POLICIES}
    copies: dict[str, list[int]] = {name: [] for name in EXPERT_POLICIES}
    owners = owners_of(experts, ranks=ranks)
    for seed in range(SEEDS):
        before, after = (popularity("W1", seed + more, 0, owners) for more in (0, 100))
        drawn = np.random.default_rng(seed)
        now = 0.7 * before + 0.3 * after
        rows = np.stack([drawn.multinomial(ROWS // ranks, now) for _ in range(ranks)])
        request = ExpertRequest(rows, slots=slots, seen=drawn.multinomial(ROWS, before))
        for name in EXPERT_POLICIES:
            schedule = plan_experts(name, request)
            skews[name].append(schedule.skew)
            copies[name].append(schedule.copies)
    return {
        name: {
            "mean_skew": statistics.mean(each),
            "worst_skew": max(each),
            "copies": statistics.mean(copies[name]),
        }
        for name, each in skews.items()
    }


def measure() -> dict[str, object]:
    """Plan everything and return the figures."""
    stamp = LoadStamp()
    for loop in (fill, level, share):
        compile_loop(loop)
    cases = [(f"{x} experts, {r} ranks, {s} slots", x, r, s) for x, r in SIZES for s in (1, 2)]
    exact = {
        name: {kind: _exact(experts, ranks, slots, kind) for kind in WORKLOADS}
        for name, experts, ranks, slots in cases
    }
    return {
        "bench": "planner.experts",
        "environment": environment(),
        "exact_loads": exact,
        "stale_loads": {name: _stale(x, r, s) for name, x, r, s in cases},
        "other_load_cores": stamp.other_load(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
    sys.stdout.write("\n")
