"""Policies of experts by name: from the rows that routers chose to who computes them.

Kept true (tests/unit/balance/expert/test_policies.py, by Hypothesis)
    Every policy's schedule passes ``check_experts`` for any rows, with empty experts and ranks.
"""

from equipoise.balance.expert.auto import PolicyChoice, choose_policy
from equipoise.balance.expert.eplb import eplb
from equipoise.balance.expert.exact import exact
from equipoise.balance.expert.hecate import hecate
from equipoise.balance.expert.request import ExpertPolicy, ExpertRequest
from equipoise.balance.expert.tutel import tutel
from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.schedule.expert.schedule import ExpertSchedule, schedule_experts


def fixed(request: ExpertRequest) -> ExpertSchedule:
    """Every expert on its owner."""
    return schedule_experts(request.rows)


EXPERT_POLICIES: dict[str, ExpertPolicy] = {
    "fixed": fixed,
    "exact": exact,
    "hecate": hecate,
    "eplb": eplb,
    "tutel": tutel,
}
"""Every policy by name; ``AUTO`` chooses between them."""

AUTO = "auto"
"""The policy that takes the cheapest of the others."""


def plan_experts(policy: str, request: ExpertRequest) -> ExpertSchedule:
    """The schedule that a policy writes.

    >>> import numpy as np
    >>> plan_experts("auto", ExpertRequest(np.array([[90, 2, 1, 1]] * 2))).policy
    'exact'

    Raises:
        SpecError: no policy has that name.
        LayoutError: ranks, experts and the policy do not go together.
    """
    if policy == AUTO:
        return choose_experts(request).schedule
    if policy not in EXPERT_POLICIES:
        raise SpecError(
            f'No policy of experts is called "{policy}". Nearest: '
            f"{nearest(policy, [*EXPERT_POLICIES, AUTO])}. All: "
            f"{', '.join(EXPERT_POLICIES)}, {AUTO}."
        )
    return EXPERT_POLICIES[policy](request)


def choose_experts(request: ExpertRequest, *, trial: str = "") -> PolicyChoice:
    """The cheapest schedule of all policies, or the one that is tried, and their prices."""
    return choose_policy(request, EXPERT_POLICIES, trial=trial)
