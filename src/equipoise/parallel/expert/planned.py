"""What schedules of experts did in a step, as integers that ranks may sum.

What it decides
    A micro-batch is counted in its backward pass, which runs once: a forward that is recomputed
    is not counted twice, and a forward without a backward is not counted. Only the bytes of copies
    are those of all passes of training: a forward that is recomputed sends weights again.

Kept true (tests/multi/train/test_expert.py)
    Loads before and after, copies and choices of policies are those of the schedules.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.balance.expert.auto import PolicyChoice
from equipoise.balance.expert.policies import EXPERT_POLICIES

_SINGLE = 5

PLANNED = _SINGLE + 2 * len(EXPERT_POLICIES)
"""Numbers of ``PlannedLoads``."""


@dataclass(slots=True, eq=False)
class PlannedLoads:
    """What schedules did since the last step, of the micro-batches that had a backward."""

    before: int = 0
    """Rows of the fullest rank without copies, times ranks, summed."""
    after: int = 0
    """Rows of the fullest rank, times ranks, summed."""
    rows: int = 0
    """All rows."""
    copies: int = 0
    copied_bytes: int = 0
    """Weights that left their rank, and gradients back, over all ranks that share the experts."""
    chosen: dict[str, int] = field(default_factory=dict)
    """Micro-batches of each policy, where there was a choice."""
    priced: dict[str, int] = field(default_factory=dict)
    """Prices of each policy, in rows, where there was a choice."""

    def add(self, choice: PolicyChoice, copied_bytes: int, *, is_trained: bool = True) -> None:
        """Count a micro-batch and what its backward moves; one without rows is none.

        ZeRO sums gradients in a pass without tokens, for which policies choose nothing.

        Args:
            choice: Its schedule.
            copied_bytes: Of the weights that leave their rank once.
            is_trained: Whether experts have gradients.
        """
        schedule = choice.schedule
        if not schedule.rows.any():
            return
        ranks = schedule.ranks
        self.before += ranks * int(schedule.computed_by_owners.max())
        self.after += ranks * int(schedule.computed.max())
        self.rows += int(schedule.rows.sum())
        self.copies += schedule.copies
        self.copied_bytes += copied_bytes * (schedule.remakes + is_trained)
        for name, price in choice.prices.items():
            self.priced[name] = self.priced.get(name, 0) + round(price)
            self.chosen[name] = self.chosen.get(name, 0) + (name == schedule.policy)

    def numbers(self) -> list[int]:
        """All of it, int64 [PLANNED]: policies in their order, first choices and then prices."""
        single = [self.before, self.after, self.rows, self.copies, self.copied_bytes]
        chosen = [self.chosen.get(name, 0) for name in EXPERT_POLICIES]
        return single + chosen + [self.priced.get(name, 0) for name in EXPERT_POLICIES]

    @classmethod
    def of_numbers(cls, numbers: list[int]) -> "PlannedLoads":
        """The reverse of ``numbers``; policies that no micro-batch was priced for are left out."""
        known = zip(
            EXPERT_POLICIES,
            numbers[_SINGLE : _SINGLE + len(EXPERT_POLICIES)],
            numbers[_SINGLE + len(EXPERT_POLICIES) :],
            strict=True,
        )
        priced = [(name, micro_batches, price) for name, micro_batches, price in known if price]
        before, after, rows, copies, copied_bytes = numbers[:_SINGLE]
        return cls(
            before,
            after,
            rows,
            copies,
            copied_bytes,
            {name: micro_batches for name, micro_batches, _ in priced},
            {name: price for name, _, price in priced},
        )


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        loads: PlannedLoads,
        choice: PolicyChoice,
        copied_bytes: int,
        is_trained: bool,
    ) -> Tensor:
        ctx.counted = loads, choice, copied_bytes, is_trained
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        loads, choice, copied_bytes, is_trained = ctx.counted
        loads.add(choice, copied_bytes, is_trained=is_trained)
        return grads[0], None, None, None, None


def counted(
    rows: Tensor, loads: PlannedLoads, choice: PolicyChoice, copied_bytes: int, *, is_trained: bool
) -> Tensor:
    """The rows unchanged; the backward counts the schedule, every forward the weights that left."""
    if torch.is_grad_enabled():
        loads.copied_bytes += copied_bytes
    counts = loads, choice, copied_bytes, is_trained
    out: Tensor = _Counted.apply(rows, *counts)  # type: ignore[no-untyped-call]
    return out
