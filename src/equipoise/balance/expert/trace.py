"""Loads that a run's own routers made, as requests, and what each policy does with all of them.

Why
    Drawn workloads are as even, or as uneven, as their author thought. A run's journal has what its
    routers chose in every step, and how that drifted.

What it decides
    A journal has a layer's rows by expert, summed over ranks; here they are dealt to ranks evenly.
    Policies that plan from earlier loads get those of the recorded step before. Each policy is
    scored on every recorded step and layer.

Kept true (tests/unit/balance/expert/test_trace.py)
    Rows are those of the journal; the first step has no earlier loads; scores are of schedules
    that passed ``check_experts``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.expert.auto import can_serve
from equipoise.balance.expert.bound import lower_bound
from equipoise.balance.expert.policies import AUTO, EXPERT_POLICIES, plan_experts
from equipoise.balance.expert.price import price_experts
from equipoise.balance.expert.request import ExpertRequest, as_wide
from equipoise.base.arrays import Ints
from equipoise.base.errors import SpecError
from equipoise.schedule.expert.check import check_experts


@dataclass(frozen=True, slots=True)
class TraceSetting:
    """Who shares the experts of a recorded run, and their limits."""

    ranks: int
    slots: int
    least_rows: int
    row_cost: float


@dataclass(frozen=True, slots=True)
class TraceScore:
    """A policy over all recorded steps and layers."""

    policy: str
    mean_skew: float
    """Rows of the fullest rank over the mean, averaged."""
    worst_skew: float
    gap: float
    """Rows of the fullest rank over the fewest that it can have, minus 1; over all."""
    copies: float
    """Copies in a layer and step, on average."""
    price: float
    """Rows that the slowest rank could compute meanwhile, on average."""
    skews: tuple[float, ...]
    """Skew of each request, in order."""


def deal_loads(loads: Ints, ranks: int) -> Ints:
    """Rows of each rank for each expert, int64 [ranks, X], as even as whole rows are.

    >>> deal_loads(np.array([5, 1]), 2).tolist()
    [[3, 0], [2, 1]]
    """
    first = np.cumsum(loads) - loads
    nth = (np.arange(ranks)[:, np.newaxis] - first) % ranks
    rows: Ints = loads // ranks + (nth < loads % ranks)
    return rows


def trace_requests(
    loads: Mapping[int, Ints], setting: TraceSetting, steps: Sequence[int] | None = None
) -> Iterator[ExpertRequest]:
    """What policies are asked, step by step and layer by layer.

    Args:
        loads: By step, rows of each expert of each layer, int64 [layers, X].
        setting: Of the ranks.
        steps: Only these; all unless given.

    Raises:
        SpecError: a step that was not recorded.
        LayoutError: ranks without experts.
    """
    for step in sorted(loads) if steps is None else steps:
        if step not in loads:
            raise SpecError(
                f"Step {step} is not in this run's journal, which has experts' loads of steps "
                f"{min(loads)} to {max(loads)}."
            )
        before = loads.get(step - 1)
        for layer, table in enumerate(loads[step]):
            yield ExpertRequest(
                deal_loads(table, setting.ranks),
                slots=setting.slots,
                least_rows=setting.least_rows,
                seen=None if before is None else before[layer],
                row_cost=setting.row_cost,
            )


def score_trace(requests: Sequence[ExpertRequest]) -> list[TraceScore]:
    """Every policy that these ranks and slots allow, and the cheapest for each request."""
    scores = []
    for policy in (*EXPERT_POLICIES, AUTO):
        if policy != AUTO and not can_serve(policy, requests[0]):
            continue
        schedules = [plan_experts(policy, each) for each in requests]
        for each in schedules:
            check_experts(each)
        skews = [each.skew for each in schedules]
        fullest = sum(int(each.computed.max()) for each in schedules)
        pairs = list(zip(requests, schedules, strict=True))
        lowest = sum(lower_bound(as_wide(each, plan), each.loads) for each, plan in pairs)
        prices = [price_experts(plan, each.prices) for each, plan in pairs]
        scores.append(
            TraceScore(
                policy,
                float(np.mean(skews)),
                max(skews),
                fullest / lowest - 1.0 if lowest else 0.0,
                float(np.mean([each.copies for each in schedules])),
                float(np.mean(prices)),
                tuple(skews),
            )
        )
    return scores
