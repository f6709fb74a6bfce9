"""Linear layers and the gated feed-forward with float8 products, forward and backward.

What it decides
    All three products of a weight are of float8 rows (``numerics.fp8``), and each rounds its
    operands along the dim that it contracts: the forward rounds tokens and weight rows, the input's
    gradient rounds gradients of tokens and weight columns, the weight's gradient rounds columns of
    both over the tokens of a micro-batch. What is kept for the backward is what ``nn.project``
    keeps, in the activations' dtype. Weights' gradients are not deferred.

Kept true (tests/unit/numerics/test_linear.py)
    Outputs and gradients equal the formulas on rounded operands.

Shapes: T tokens, D model width, F hidden units, O output width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from equipoise.numerics.fp8 import RoundedRows, multiply_rows, round_rows


def _forward(x_TD: Tensor, *weights: Tensor) -> list[Tensor]:
    """``x @ weight.T`` for each weight [O, D]."""
    x = round_rows(x_TD)
    return [multiply_rows(x, round_rows(each), x_TD.dtype, is_fast=True) for each in weights]


def _of_input(grad_TO: Tensor, weight_OD: Tensor) -> Tensor:
    """``grad @ weight``."""
    return multiply_rows(round_rows(grad_TO), round_rows(weight_OD.t()), grad_TO.dtype)


def _of_weight(grad_TO: Tensor, x_DT: RoundedRows) -> Tensor:
    """``grad.T @ x``."""
    return multiply_rows(round_rows(grad_TO.t()), x_DT, grad_TO.dtype)


class _ProjectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_TD, *weights)
        return tuple(_forward(x_TD, *weights))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, *weights = ctx.saved_tensors
        grad_x = _of_input(grads[0], weights[0])
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            grad_x += _of_input(grad, weight)
        x_DT = round_rows(x_TD.t())
        of_weights = (
            _of_weight(grad, x_DT) if is_needed else None
            for grad, is_needed in zip(grads, ctx.needs_input_grad[1:], strict=True)
        )
        return grad_x, *of_weights


def project(x_TD: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """``x @ weight.T`` for each weight [O, D]."""
    out: tuple[Tensor, ...] = _ProjectRows.apply(x_TD, *weights)
    return out


def add_project(residual_TD: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """``residual + x @ weight.T``."""
    (out_TD,) = project(x, weight)
    return residual_TD + out_TD


class _SwiGluRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
        gate_TF, up_TF = _forward(x_TD, gate_FD, up_FD)
        ctx.save_for_backward(x_TD, gate_TF, up_TF, gate_FD, up_FD, down_DF)
        (out_TD,) = _forward(silu(gate_TF).mul_(up_TF), down_DF)
        return out_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, gate_TF, up_TF, gate_FD, up_FD, down_DF = ctx.saved_tensors
        _, needs_gate, needs_up, needs_down = ctx.needs_input_grad
        (grad,) = grads
        grad_hidden = _of_input(grad, down_DF)
        silu_TF = silu(gate_TF)
        grad_down = None
        if needs_down:
            grad_down = _of_weight(grad, round_rows((silu_TF * up_TF).t()))
        grad_up = torch.mul(grad_hidden, silu_TF, out=silu_TF)
        grad_gate = torch.ops.aten.silu_backward(grad_hidden.mul_(up_TF), gate_TF)
        grad_x = _of_input(grad_gate, gate_FD)
        grad_x += _of_input(grad_up, up_FD)
        x_DT = round_rows(x_TD.t())
        return (
            grad_x,
            _of_weight(grad_gate, x_DT) if needs_gate else None,
            _of_weight(grad_up, x_DT) if needs_up else None,
            grad_down,
        )


def add_swiglu(
    residual_TD: Tensor, x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor
) -> Tensor:
    """``residual + (silu(x gate) * (x up)) down``. Source: arXiv:2002.05202."""
    out: Tensor = _SwiGluRows.apply(x_TD, gate_FD, up_FD, down_DF)
    return residual_TD + out
