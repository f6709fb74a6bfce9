"""Linear layers that share an input, and the gated feed-forward, with lean backwards.

Why
    Autograd's own backward of ``q(x), k(x), v(x)`` makes three input gradients and adds
    them; a chain of ``addmm`` writes them into one buffer. SwiGLU keeps only gate and up and
    recomputes their product in the backward: F fewer values per token, for one more pass.

What it decides
    A weight's gradient is a product that can be deferred: see ``nn.defer``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.nn.defer import DeferredProduct, WeightGradients
from equipoise.numerics import linear


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_TD, *weights)
        ctx.weight_gradients = WeightGradients(first=1)
        return tuple(x_TD @ weight.t() for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, *weights = ctx.saved_tensors
        grad_x = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        return grad_x, *ctx.weight_gradients.take(
            ctx.needs_input_grad, *(DeferredProduct(grad, x_TD) for grad in grads)
        )


def project(x_TD: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """``x @ weight.T`` for each weight [out, D]; gradients of x are summed in one buffer."""
    out: tuple[Tensor, ...] = _Project.apply(x_TD, *weights)
    return out


class _AddProject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual_TD: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight_gradients = WeightGradients(first=2)
        return torch.addmm(residual_TD, x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        return (
            grad,
            grad @ weight,
            *ctx.weight_gradients.take(ctx.needs_input_grad, DeferredProduct(grad, x)),
        )


def add_project(residual_TD: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """``residual + x @ weight.T`` in one matmul."""
    out: Tensor = _AddProject.apply(residual_TD, x, weight)
    return out


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual_TD: Tensor,
        x_TD: Tensor,
        gate_FD: Tensor,
        up_FD: Tensor,
        down_DF: Tensor,
    ) -> Tensor:
        gate_TF = x_TD @ gate_FD.t()
        up_TF = x_TD @ up_FD.t()
        ctx.save_for_backward(x_TD, gate_TF, up_TF, gate_FD, up_FD, down_DF)
        ctx.weight_gradients = WeightGradients(first=2)
        hidden_TF = torch.nn.functional.silu(gate_TF).mul_(up_TF)
        return torch.addmm(residual_TD, hidden_TF, down_DF.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, gate_TF, up_TF, gate_FD, up_FD, down_DF = ctx.saved_tensors
        (grad,) = grads
        grad_hidden = grad @ down_DF
        silu_TF = torch.nn.functional.silu(gate_TF)
        hidden_TF = silu_TF * up_TF
        grad_up = torch.mul(grad_hidden, silu_TF, out=silu_TF)
        grad_gate = torch.ops.aten.silu_backward(grad_hidden.mul_(up_TF), gate_TF)
        grad_x = (grad_gate @ gate_FD).addmm_(grad_up, up_FD)
        products = (
            DeferredProduct(grad_gate, x_TD, is_wide=True),
            DeferredProduct(grad_up, x_TD, is_wide=True),
            DeferredProduct(grad, hidden_TF),
        )
        return grad, grad_x, *ctx.weight_gradients.take(ctx.needs_input_grad, *products)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TF, up_TF)
        hidden: Tensor = torch.nn.functional.silu(gate_TF).mul_(up_TF)
        return hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate_TF, up_TF = ctx.saved_tensors
        grad_up = grads[0] * torch.nn.functional.silu(gate_TF)
        return torch.ops.aten.silu_backward(grads[0] * up_TF, gate_TF), grad_up


def gate_up(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """``silu(gate) * up``, keeping its two inputs alone."""
    out: Tensor = _Gate.apply(gate_TF, up_TF)
    return out


def add_swiglu(
    residual_TD: Tensor, x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor
) -> Tensor:
    """``residual + (silu(x gate) * (x up)) down``. Source: arXiv:2002.05202."""
    out: Tensor = _SwiGlu.apply(residual_TD, x_TD, gate_FD, up_FD, down_DF)
    return out


@dataclass(frozen=True, slots=True)
class Products:
    """The dense layers' matrix products, in one precision."""

    project: Callable[..., tuple[Tensor, ...]]
    add_project: Callable[[Tensor, Tensor, Tensor], Tensor]
    add_swiglu: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


PLAIN = Products(project, add_project, add_swiglu)
"""In the dtype of activations and weights."""

FP8 = Products(linear.project, linear.add_project, linear.add_swiglu)
"""Products of rows rounded to float8, with outputs in the dtype of activations."""
