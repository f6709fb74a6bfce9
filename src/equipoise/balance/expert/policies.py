"""Policies of experts by name: from the rows that routers chose to who computes them.

Kept true (tests/unit/balance/expert/test_policies.py, by Hypothesis)
    Every policy's schedule passes ``check_experts`` for any rows, with empty experts and ranks.
"""

import numpy as np

from equipoise.balance.expert.auto import PolicyChoice, choose_policy
from equipoise.balance.expert.eplb import eplb
from equipoise.balance.expert.exact import exact
from equipoise.balance.expert.hecate import hecate
from equipoise.balance.expert.request import ExpertPolicy, ExpertRequest
from equipoise.balance.expert.tutel import tutel
from equipoise.base.errors import LayoutError, SpecError
from equipoise.base.nearest import nearest
from equipoise.schedule.expert.schedule import ExpertSchedule, schedule_experts
from equipoise.spec.run.layout import ExpertsSpec


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


def require_balanced(wish: ExpertsSpec, experts: int, *, ep: int, etp: int) -> None:
    """Refuse a policy that ranks cannot obey; ``fixed`` runs wherever experts can be shared.

    Args:
        wish: The policy and its limits.
        experts: Those with weights.
        ep: Ranks that share them.
        etp: Ranks that share the hidden units of each.

    Raises:
        LayoutError: the policy copies whole experts and no rank has one, or it does not take this
            number of experts or slots.
    """
    if wish.policy == "fixed" or ep * etp == 1:
        return
    if etp > 1 and wish.policy != "tutel":
        raise LayoutError(
            f'experts.policy = "{wish.policy}" copies whole experts, but etp = {etp} ranks share '
            f"the hidden units of each. Set layout.etp = 1, or experts.policy to "
            f'"fixed" or "tutel".'
        )
    if etp == 1:
        rows = np.zeros((ep, experts), dtype=np.int64)
        plan_experts(wish.policy, ExpertRequest(rows, wish.slots, wish.least_rows))


def choose_experts(request: ExpertRequest, *, trial: str = "") -> PolicyChoice:
    """The cheapest schedule of all policies, or the one that is tried, and their prices."""
    return choose_policy(request, EXPERT_POLICIES, trial=trial)
