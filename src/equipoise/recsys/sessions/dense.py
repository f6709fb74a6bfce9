"""A module computed once for each distinct row of its input.

Why
    The MLP for numbers sees the same numbers again in every sample of a session. Each output row
    is a function of its input row alone, so distinct rows are enough.

What it decides
    Rows are equal if all their bits are, compared in full. Matrix products of fewer than 8 rows
    take another kernel, whose sums round differently: such batches are computed as they are, and
    fewer distinct rows are filled up to 8, so that outputs equal the plain ones to the bit. A
    distinct row's gradient is the sum over its samples in their order.

Kept true (tests/unit/recsys/sessions/test_dense.py)
    Outputs are equal to the bit and gradients within 1e-6; products shrink by the rows shared.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.sessions.inverse import find_rows, fold_rows, hash_rows

_LEAST_ROWS = 8


class RowSharing:
    """Hooks on a module, so that it computes distinct rows; counts how many."""

    def __init__(self, module: nn.Module) -> None:
        """Share rows of ``module``, whose input and output are [B, any]."""
        self.rows = self.computed = 0
        self._inverse: Tensor | None = None
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        del module
        (given,) = args
        count = len(given)
        self._inverse = None
        self.rows += count
        if count > _LEAST_ROWS and given.shape[1]:
            inverse, first = find_rows(as_bags(given), ("row",), hash_rows)
            rows = np.concatenate((first, np.zeros(max(0, _LEAST_ROWS - len(first)), np.int64)))
            if len(rows) < count:
                self._inverse = inverse
                given = given[torch.from_numpy(rows).to(given.device)]
        self.computed += len(given)
        return (given,)

    def _after(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        del module, args
        if self._inverse is None:
            return out
        expanded: Tensor = _Expanded.apply(out, self._inverse)
        return expanded


def as_bags(rows: Tensor) -> KeyedJagged:
    """Rows of floats as bags of their bits, so that they can be compared as ids are."""
    bits = rows.detach().float().contiguous().view(torch.int32).long()
    lengths = torch.full((1, len(rows)), rows.shape[1], dtype=torch.int32, device=rows.device)
    return KeyedJagged(("row",), lengths, bits.flatten())


class _Expanded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse, ctx.count = inverse, len(rows)
        return rows[inverse]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return fold_rows(grads[0], ctx.inverse, ctx.count), None
