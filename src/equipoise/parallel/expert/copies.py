"""Weights of experts that travel to copies, and gradients that return to their owners.

What it decides
    A copy lasts for one product of one layer. ``copied_swiglu`` fetches the weights, multiplies
    and drops them; its backward fetches them again, and sends each copy's gradient to the owner,
    who sums gradients of an expert in the order of the ranks that computed it. What the optimizer
    and checkpoints know are owners' weights alone.

    An owner's rank sends each copy's gate, up and down as one row of a single uneven
    all-to-all::

        rank 0 owns 0 1      copies (0, rank 1) (1, rank 1)     sends   -     | 0 1
        rank 1 owns 2 3      copy   (2, rank 0)                         2     | -

    Every rank takes part, also one that neither sends nor receives.

Kept true (tests/multi/parallel/test_balanced.py)
    Loss and every gradient equal one rank's; bytes sent are those of the schedule.

Sources
    SparseAllGather and SparseReduceScatter: Hecate, arXiv:2502.02581.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from equipoise.nn.moe.matmul import swiglu_backward, swiglu_forward
from equipoise.schedule.expert.schedule import ExpertSchedule


class WeightTraffic(Protocol):
    """How weights of other ranks come, and their gradients go back; every rank takes part."""

    @property
    def remakes(self) -> bool:
        """Whether the backward fetches weights again."""

    def fetch(self, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gates, up and down projections to compute with, for those that this rank keeps."""

    def give_back(
        self, grads: tuple[Tensor, ...], weights: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of what this rank keeps, for those of what it computed with; None for 0."""


Move = Callable[[Tensor, list[int], list[int]], Tensor]
"""Sends runs of rows to the ranks in order and receives theirs, as ``ExpertExchange.move``."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyTraffic:
    """One rank's part of the weights that travel in a micro-batch."""

    move: Move
    out: list[int]
    """Local numbers of the experts that leave, by the rank that they go to."""
    sent: list[int]
    """How many go to each rank."""
    received: list[int]
    """How many come from each."""
    remakes: bool
    """Whether the backward fetches copies again."""

    @classmethod
    def of(cls, schedule: ExpertSchedule, rank: int, move: Move) -> "CopyTraffic":
        """The part of ``rank`` in a schedule."""
        copies = schedule.places[schedule.is_copy]
        mine = copies[schedule.owners[copies[:, 0]] == rank]
        mine = mine[np.lexsort((mine[:, 0], mine[:, 1]))]
        first = int(np.searchsorted(schedule.owners, rank))
        copied = schedule.copied
        return cls(
            move,
            (mine[:, 0] - first).tolist(),
            copied[rank].tolist(),
            copied[:, rank].tolist(),
            schedule.remakes,
        )

    def fetch(self, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gates, up and down projections of the experts that are copied here, ascending."""
        leaving = torch.cat([each[self.out].flatten(1) for each in weights], dim=1)
        arrived = self.move(leaving, self.sent, self.received)
        return self._apart(arrived, weights)

    def give_back(
        self, grads: tuple[Tensor, ...], weights: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Gradients of owned experts: sums over their copies, in the order of ranks."""
        leaving = torch.cat([each.flatten(1) for each in grads], dim=1)
        arrived = self._apart(self.move(leaving, self.received, self.sent), weights)
        sums = tuple(torch.zeros_like(each) for each in weights)
        for total, each in zip(sums, arrived, strict=True):
            for at, expert in enumerate(self.out):
                total[expert] += each[at]
        return sums

    @staticmethod
    def _apart(rows: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Rows of whole experts as their three matrices."""
        sizes = [each[:1].numel() for each in weights]
        parts = rows.split(sizes, dim=1)
        return tuple(
            part.reshape(len(rows), *each.shape[1:])
            for part, each in zip(parts, weights, strict=True)
        )


@dataclass(slots=True, eq=False)
class SharedTraffic:
    """Weights of one layer for several products of its rows, fetched and given back once.

    The first product of a pass fetches them, forward or backward, and the last one drops them. In
    the backward, the last one gives back the sum of all products' gradients.
    """

    base: WeightTraffic
    products: int
    """Calls of ``copied_swiglu`` on these weights, as many on every rank."""
    _fetched: tuple[Tensor, ...] = ()
    _uses: int = 0
    _sums: tuple[Tensor, ...] = ()
    _given: int = 0

    @property
    def remakes(self) -> bool:
        """As of the base."""
        return self.base.remakes

    def fetch(self, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """As of the base."""
        if not self._uses:
            self._fetched = self.base.fetch(weights)
        fetched, self._uses = self._fetched, (self._uses + 1) % self.products
        if not self._uses:
            self._fetched = ()
        return fetched

    def give_back(
        self, grads: tuple[Tensor, ...], weights: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """Nothing before the last product, and then as of the base for all of them."""
        if self._given:
            grads = tuple(one + more for one, more in zip(self._sums, grads, strict=True))
        self._sums, self._given = grads, (self._given + 1) % self.products
        if self._given:
            return tuple(None for _ in weights)
        self._sums = ()
        return self.base.give_back(grads, weights)


class _CopiedSwiGlu(torch.autograd.Function):
    """Keeps rows, gate and up, and the owner's weights, which it keeps anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        ends_P: Tensor,
        gate_XFD: Tensor,
        up_XFD: Tensor,
        down_XDF: Tensor,
        traffic: WeightTraffic,
    ) -> Tensor:
        own = gate_XFD, up_XFD, down_XDF
        copies = traffic.fetch(own)
        y_RD, gate_RF, up_RF = swiglu_forward(x_RD, ends_P, *copies)
        kept = () if traffic.remakes else copies
        ctx.save_for_backward(x_RD, ends_P, gate_RF, up_RF, *own, *kept)
        ctx.traffic = traffic
        return y_RD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, ends_P, gate_RF, up_RF, *weights = ctx.saved_tensors
        traffic: WeightTraffic = ctx.traffic
        own, kept = tuple(weights[:3]), tuple(weights[3:])
        copies = traffic.fetch(own) if traffic.remakes else kept
        grad_x, *of_copies = swiglu_backward(grads[0], x_RD, ends_P, gate_RF, up_RF, *copies)
        if not ctx.needs_input_grad[2]:  # frozen, on every rank alike
            return grad_x, None, None, None, None, None
        return grad_x, None, *traffic.give_back(tuple(of_copies), own), None


def copied_swiglu(
    x_RD: Tensor,
    ends_P: Tensor,
    gate_XFD: Tensor,
    up_XFD: Tensor,
    down_XDF: Tensor,
    traffic: WeightTraffic,
) -> Tensor:
    """``expert_swiglu`` with the weights of other ranks' experts.

    Args:
        x_RD: Rows sorted by expert [R, D]; R may be 0.
        ends_P: Where the rows of each copy end, int32 [P].
        gate_XFD: Gates of this rank's own experts, which others may fetch [X, F, D].
        up_XFD: Likewise [X, F, D].
        down_XDF: Likewise [X, D, F].
        traffic: Of this rank; every rank of the group calls this.
    """
    weights = gate_XFD, up_XFD, down_XDF
    out: Tensor = _CopiedSwiGlu.apply(x_RD, ends_P, *weights, traffic)  # type: ignore[no-untyped-call]
    return out
