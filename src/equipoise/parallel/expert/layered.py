"""Experts' products where a layer's weights are there for its turn alone, slice by slice.

Kept true (tests/multi/parallel/test_expert_tiers.py)
    The bits of ``expert_swiglu`` on all weights at once.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from equipoise.nn.moe.matmul import swiglu_backward, swiglu_forward

Slice = tuple[Tensor, ...]
"""Gates [x, F, D], up [x, F, D] and down projections [x, D, F] of a run of experts."""


class LayerTurns(Protocol):
    """Has a layer's weights in its turn."""

    def enter(self, number: int) -> list[Slice]:
        """All slices of a layer, in the order of experts; no other layer's stay valid."""

    def leave(self, number: int, gradients: Sequence[Slice]) -> None:
        """Take gradients of all slices."""


class Layered:
    """What ``Experts.elsewhere`` calls for one layer."""

    def __init__(self, turns: LayerTurns, number: int) -> None:
        self._turns, self._number = turns, number

    def __call__(self, x_RD: Tensor, counts_X: Tensor) -> Tensor:
        """Outputs [R, D]; rows are sorted by expert, ``counts_X`` rows each."""
        out: Tensor = _LayeredSwiGlu.apply(  # type: ignore[no-untyped-call]
            x_RD, counts_X, self._turns, self._number
        )
        return out


def _runs(counts_X: Tensor, slices: Sequence[Slice]) -> list[tuple[slice, Tensor]]:
    """The rows of each slice's experts, and where each of them ends among these, int32 [x]."""
    counts = counts_X.split([len(each[0]) for each in slices])
    stops = torch.stack([each.sum() for each in counts]).cumsum(0).tolist()
    rows = [slice(start, stop) for start, stop in pairwise([0, *stops])]
    return [(run, each.cumsum(0).to(torch.int32)) for run, each in zip(rows, counts, strict=True)]


class _LayeredSwiGlu(torch.autograd.Function):
    """Keeps rows, gate and up; weights come again for the backward."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, counts_X: Tensor, turns: LayerTurns, number: int) -> Tensor:
        slices = turns.enter(number)
        runs = _runs(counts_X, slices)
        parts = [
            swiglu_forward(x_RD[rows], ends, *weights)
            for (rows, ends), weights in zip(runs, slices, strict=True)
        ]
        y_RD, gate_RF, up_RF = (torch.cat(each) for each in zip(*parts, strict=True))
        ctx.save_for_backward(x_RD, counts_X, gate_RF, up_RF)
        ctx.layer = turns, number
        return y_RD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x_RD, counts_X, gate_RF, up_RF = ctx.saved_tensors
        turns, number = ctx.layer
        slices = turns.enter(number)
        grad_x, of_weights = [], []
        for (rows, ends), weights in zip(_runs(counts_X, slices), slices, strict=True):
            kept = x_RD[rows], ends, gate_RF[rows], up_RF[rows]
            own_x, *own = swiglu_backward(grads[0][rows], *kept, *weights)
            grad_x.append(own_x)
            of_weights.append(tuple(own))
        turns.leave(number, of_weights)
        return torch.cat(grad_x), None, None, None
