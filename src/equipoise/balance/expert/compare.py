"""Policies of experts on one workload: how even, how many copies, how far from the bounds.

What it decides
    A policy that plans from earlier loads has seen those of the step before. Each score stands
    beside what no plan can beat: the fullest rank within the slots, and the copies that any plan
    as even as this one needs.

Kept true (tests/unit/cli/explain/test_experts.py)
    Scores are of schedules that passed ``check_experts``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.balance.expert.auto import can_serve
from equipoise.balance.expert.bound import lower_bound
from equipoise.balance.expert.fewest import fewest_copies
from equipoise.balance.expert.policies import EXPERT_POLICIES, plan_experts
from equipoise.balance.expert.price import price_experts
from equipoise.balance.expert.request import ExpertRequest, as_wide
from equipoise.balance.expert.workload import workload
from equipoise.schedule.expert.check import check_experts
from equipoise.schedule.expert.schedule import ExpertSchedule


@dataclass(frozen=True, slots=True)
class ExpertSetting:
    """A workload, and who shares it."""

    kind: str
    """``W0`` to ``W7``."""
    seed: int
    step: int
    ranks: int
    experts: int
    slots: int
    """Copies that a rank may hold."""
    least_rows: int
    """Fewest rows that a copy is made for."""
    rows_per_rank: int
    row_cost: float = 0.0
    """As in ``ExpertRequest``."""

    def request(self) -> ExpertRequest:
        """What policies are asked in this step.

        Raises:
            SpecError: an unknown kind.
            LayoutError: ranks without experts, or slots below 0.
        """
        sizes = {"ranks": self.ranks, "experts": self.experts, "rows_per_rank": self.rows_per_rank}
        seen = None
        if self.step:
            seen = workload(self.kind, self.seed, self.step - 1, **sizes).sum(axis=0)
        rows = workload(self.kind, self.seed, self.step, **sizes)
        return ExpertRequest(
            rows,
            slots=self.slots,
            least_rows=self.least_rows,
            seen=seen,
            row_cost=self.row_cost,
        )


@dataclass(frozen=True, slots=True)
class ExpertScore:
    """A schedule beside its bounds."""

    schedule: ExpertSchedule
    lowest_rows: int
    """Rows of the fullest rank that no plan can beat within the slots, or with as many copies on a
    rank as this one has, where these are more."""
    fewest_copies: int
    """Copies of any plan that is as even."""
    price: float
    """Rows that the slowest rank could compute in the time that the schedule takes."""

    @property
    def policy(self) -> str:
        """Who wrote it."""
        return self.schedule.policy

    @property
    def gap(self) -> float:
        """The fullest rank over the lowest that it can be, minus 1."""
        return int(self.schedule.computed.max()) / self.lowest_rows - 1 if self.lowest_rows else 0.0


def compare_experts(request: ExpertRequest, policies: Sequence[str]) -> list[ExpertScore]:
    """Score policies, in the order given.

    Raises:
        SpecError: no policy has that name.
        LayoutError: ranks, experts and a policy do not go together.
    """
    scores = []
    for policy in policies:
        schedule = plan_experts(policy, request)
        check_experts(schedule)
        wide = as_wide(request, schedule)
        lowest = lower_bound(wide, request.loads)
        fewest = fewest_copies(wide, int(schedule.computed.max()))
        scores.append(
            ExpertScore(schedule, lowest, fewest, price_experts(schedule, request.prices))
        )
    return scores


def policy_names(request: ExpertRequest) -> list[str]:
    """The policies that take any number of experts, and those that ranks and slots allow."""
    return [name for name in EXPERT_POLICIES if can_serve(name, request)]
