"""Policies of experts by name: from the rows that routers chose to who computes them.

Kept true (tests/unit/balance/expert/test_policies.py, by Hypothesis)
    Every policy's schedule passes ``check_experts`` for any rows, with empty experts and ranks.
"""

from equipoise.balance.expert.eplb import eplb
from equipoise.balance.expert.exact import exact
from equipoise.balance.expert.hecate import hecate
from equipoise.balance.expert.request import ExpertPolicy, ExpertRequest
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
}
"""Every policy by name."""


def plan_experts(policy: str, request: ExpertRequest) -> ExpertSchedule:
    """The schedule that a policy writes.

    Raises:
        SpecError: no policy has that name.
        LayoutError: ranks, experts and the policy do not go together.
    """
    if policy not in EXPERT_POLICIES:
        raise SpecError(
            f'No policy of experts is called "{policy}". Nearest: '
            f"{nearest(policy, list(EXPERT_POLICIES))}. All: {', '.join(EXPERT_POLICIES)}."
        )
    return EXPERT_POLICIES[policy](request)
