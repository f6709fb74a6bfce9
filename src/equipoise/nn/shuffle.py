"""Tokens of a micro-batch in another order, which attention alone must know.

Why
    Ranks that share weights keep runs of a micro-batch's tokens between blocks. Another order of
    the tokens is another rank for each, at no byte: the sum that leaves a block reaches the rank
    of its token (a shuffled reduce-scatter), and what enters the next block is put back in order
    (a shuffled all-gather).

What it decides
    Everything but attention treats each token for itself. So tokens, labels and positions are put
    in the new order once, and queries, keys and values back into that of the text, each layer::

        tokens a b c d --order 2 0 3 1--> c a | d b    embed, experts, norms, loss
                                            v    ^
                                attend:  a b c d

Kept true (tests/unit/nn/test_shuffle.py, tests/multi/parallel/test_speculative.py)
    Logits are in the order of the text; loss and every gradient equal those without a shuffle.

Sources
    Shuffled reduce-scatter and all-gather: Speculative MoE, arXiv:2503.04398.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.nn.attention import PackAttention

PlaceTokens = Callable[[Tensor, Tensor], Tensor]
"""From token ids and their positions, int64 [T], to the order in which to keep them, int64 [T]."""


class _Permute(torch.autograd.Function):
    """Rows in another order; the backward puts gradients back without adding."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return grads[0][torch.argsort(order)], None


def permute_rows(rows: Tensor, order: Tensor) -> Tensor:
    """``rows[order]``, differentiable."""
    out: Tensor = _Permute.apply(rows, order)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Shuffle:
    """An order of a micro-batch's tokens, and the way back."""

    order_T: Tensor
    """The token at each place, int64 [T]."""
    back_T: Tensor
    """The place of each token, int64 [T]."""

    @classmethod
    def of(cls, order_T: Tensor) -> "Shuffle":
        """The shuffle of an order."""
        return cls(order_T, torch.argsort(order_T))

    def pack(self, pack: PackAttention) -> PackAttention:
        """The pack for tokens in the new order."""

        def attend(q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
            q, k, v = (permute_rows(each, self.back_T) for each in (q_THE, k_TGE, v_TGE))
            return permute_rows(pack.attend(q, k, v), self.order_T)

        positions = pack.positions_T[self.order_T]
        return dataclasses.replace(pack, positions_T=positions, attend=attend)
