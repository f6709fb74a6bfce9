"""Matrix products of rows sorted by expert: each expert's rows with its own weights.

What it decides
    Which code computes them: ``torch.nn.functional.grouped_mm`` where it runs (fp32, bf16 and
    fp16 on CPU, bf16 and fp16 on CUDA, rows of a multiple of 16 bytes), otherwise a loop over
    the experts. Callers see one name.

    ::

        rows of expert 0 | of expert 1 | (2 has none) | of expert 3       R rows
        ends_X           3             5              5           9       running totals

Kept true (tests/unit/nn/moe/test_matmul.py)
    Both forms equal one product per expert, forward and backward. Experts without rows, or no
    rows at all, give empty products and zero gradients.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

_GROUPED = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}
_ROW_BYTES = 16
"""torch 2.13 refuses other strides: "strides should be multiple of 16 bytes"."""


def runs_grouped(rows: Tensor, *widths: int) -> bool:
    """Whether torch's kernel takes rows of this dtype and device, and these widths."""
    whole = all(width * rows.element_size() % _ROW_BYTES == 0 for width in widths)
    return whole and rows.dtype in _GROUPED.get(rows.device.type, ())


def _spans(ends_X: Tensor) -> list[tuple[int, int, int]]:
    """Expert, first row and end, for each expert that has rows."""
    spans = enumerate(pairwise([0, *ends_X.tolist()]))
    return [(expert, start, stop) for expert, (start, stop) in spans if start < stop]


def multiply_rows(rows_RM: Tensor, weight_XMN: Tensor, ends_X: Tensor) -> Tensor:
    """``rows @ weight`` with the weights of each row's expert.

    Args:
        rows_RM: Rows sorted by expert [R, M].
        weight_XMN: Weights of each expert [X, M, N]; may be a transposed view.
        ends_X: Where the rows of each expert end, int32 [X]; the last is R.

    Returns:
        [R, N]; not differentiable by itself.
    """
    if len(ends_X) and runs_grouped(rows_RM, *weight_XMN.shape[1:]):
        return grouped_mm(rows_RM, weight_XMN, offs=ends_X)
    out = rows_RM.new_empty(rows_RM.shape[0], weight_XMN.shape[2])
    for expert, start, stop in _spans(ends_X):
        torch.mm(rows_RM[start:stop], weight_XMN[expert], out=out[start:stop])
    return out


def multiply_columns(left_RM: Tensor, right_RN: Tensor, ends_X: Tensor) -> Tensor:
    """``left.T @ right`` over the rows of each expert: a weight's gradient [X, M, N]."""
    widths = left_RM.shape[1], right_RN.shape[1]
    if len(ends_X) and runs_grouped(left_RM, *widths):
        return grouped_mm(left_RM.t(), right_RN, offs=ends_X)
    out = left_RM.new_zeros(len(ends_X), *widths)
    for expert, start, stop in _spans(ends_X):
        torch.mm(left_RM[start:stop].t(), right_RN[start:stop], out=out[expert])
    return out


class _ExpertSwiGlu(torch.autograd.Function):
    """Keeps rows, gate and up; the backward recomputes their product."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        ends_X: Tensor,
        gate_XFD: Tensor,
        up_XFD: Tensor,
        down_XDF: Tensor,
    ) -> Tensor:
        y_RD, gate_RF, up_RF = swiglu_forward(x_RD, ends_X, gate_XFD, up_XFD, down_XDF)
        ctx.save_for_backward(x_RD, ends_X, gate_RF, up_RF, gate_XFD, up_XFD, down_XDF)
        return y_RD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, ends_X, gate_RF, up_RF, *weights = ctx.saved_tensors
        grad_x, *of_weights = swiglu_backward(grads[0], x_RD, ends_X, gate_RF, up_RF, *weights)
        return grad_x, None, *of_weights


def swiglu_forward(
    x_RD: Tensor, ends_X: Tensor, gate_XFD: Tensor, up_XFD: Tensor, down_XDF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``expert_swiglu`` outside of autograd: outputs, and what its backward needs of gate and up.

    Returns:
        [R, D], [R, F] and [R, F].
    """
    gate_RF = multiply_rows(x_RD, gate_XFD.transpose(1, 2), ends_X)
    up_RF = multiply_rows(x_RD, up_XFD.transpose(1, 2), ends_X)
    y_RD = multiply_rows(silu(gate_RF).mul_(up_RF), down_XDF.transpose(1, 2), ends_X)
    return y_RD, gate_RF, up_RF


def swiglu_backward(
    grad_RD: Tensor,
    x_RD: Tensor,
    ends_X: Tensor,
    gate_RF: Tensor,
    up_RF: Tensor,
    gate_XFD: Tensor,
    up_XFD: Tensor,
    down_XDF: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``x``, gates, up and down projections; ``swiglu_forward`` kept the rest."""
    grad_RD = grad_RD.contiguous()
    grad_hidden = multiply_rows(grad_RD, down_XDF, ends_X)
    silu_RF = silu(gate_RF)
    grad_down = multiply_columns(grad_RD, silu_RF * up_RF, ends_X)
    grad_up = torch.mul(grad_hidden, silu_RF, out=silu_RF)
    grad_gate = torch.ops.aten.silu_backward(grad_hidden.mul_(up_RF), gate_RF)
    grad_x = multiply_rows(grad_gate, gate_XFD, ends_X)
    grad_x += multiply_rows(grad_up, up_XFD, ends_X)
    grad_gate_w = multiply_columns(grad_gate, x_RD, ends_X)
    grad_up_w = multiply_columns(grad_up, x_RD, ends_X)
    return grad_x, grad_gate_w, grad_up_w, grad_down


def expert_swiglu(
    x_RD: Tensor, ends_X: Tensor, gate_XFD: Tensor, up_XFD: Tensor, down_XDF: Tensor
) -> Tensor:
    """``(silu(x gate) * (x up)) down`` for each row, with its expert's weights.

    Args:
        x_RD: Rows sorted by expert [R, D]; R may be 0.
        ends_X: Where the rows of each expert end, int32 [X].
        gate_XFD: Gates [X, F, D].
        up_XFD: Up projections [X, F, D].
        down_XDF: Down projections [X, D, F].

    Returns:
        [R, D], differentiable once.
    """
    out: Tensor = _ExpertSwiGlu.apply(x_RD, ends_X, gate_XFD, up_XFD, down_XDF)
    return out
