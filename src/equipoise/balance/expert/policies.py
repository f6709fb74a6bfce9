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
from equipoise.base.shown import shown
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

SPECULATIVE = "speculative"
"""Every expert on its owner, as ``fixed``; tokens lie where their experts probably are."""


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
    if not isinstance(policy, str) or policy not in EXPERT_POLICIES:
        raise SpecError(
            f"No policy of experts is called {shown(policy)}. Nearest: "
            f"{nearest(str(policy), [*EXPERT_POLICIES, AUTO])}. All: "
            f"{', '.join(EXPERT_POLICIES)}, {AUTO}."
        )
    return EXPERT_POLICIES[policy](request)


def require_balanced(
    wish: ExpertsSpec, experts: int, *, ep: int, etp: int, tp: int, pp: int
) -> None:
    """Refuse a policy that ranks cannot obey; ``fixed`` runs wherever experts can be shared.

    Args:
        wish: The policy and its limits.
        experts: Those with weights.
        ep: Ranks that share them.
        etp: Ranks that share the hidden units of each.
        tp: Ranks that share all other weights, and tokens between blocks.
        pp: Ranks of a pipeline.

    Raises:
        LayoutError: the policy copies whole experts and no rank has one, or it does not take this
            number of experts or slots.
    """
    if wish.policy == SPECULATIVE:
        _require_shuffled(ep=ep, etp=etp, tp=tp, pp=pp)
    if wish.policy in ("fixed", SPECULATIVE) or ep * etp == 1:
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


def _require_shuffled(*, ep: int, etp: int, tp: int, pp: int) -> None:
    """Refuse to shuffle tokens where that saves nothing, or is not proven.

    Between blocks a tensor-parallel rank may keep any tokens, and another choice moves no byte.
    Tokens of data-parallel ranks are whose they are: wherever experts lie, as many rows are local
    as by chance. Those of a context's ranks would first have to travel there and back, as much as a
    row for one expert.
    """
    if tp == 1 or ep != tp or etp > 1:
        raise LayoutError(
            f'experts.policy = "speculative" shuffles tokens among the tensor-parallel ranks that '
            f"share the experts, which needs tp = ep of 2 or more and etp = 1; the layout has "
            f"tp = {tp}, ep = {ep}, etp = {etp}. Set layout.tp and layout.ep to the same number, "
            f'or experts.policy = "fixed".'
        )
    if pp > 1:
        raise LayoutError(
            f'experts.policy = "speculative" is not proven in a pipeline, and the layout has '
            f'pp = {pp}. Set layout.pp = 1, or experts.policy = "fixed".'
        )


def choose_experts(request: ExpertRequest, *, trial: str = "") -> PolicyChoice:
    """The cheapest schedule of all policies, or the one that is tried, and their prices."""
    return choose_policy(request, EXPERT_POLICIES, trial=trial)
