"""Root-mean-square norm whose backward touches each element three times, not nine."""

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.nn.declare import local


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # Always in fp32: squares in bf16 do not overflow, but lose the small ones.
        wide = x.float() if x.dtype == torch.bfloat16 else x
        width = x.shape[-1]
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(width)
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normed: Tensor = (wide * scale).mul_(weight)
        return normed.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide = x.float() if x.dtype == torch.bfloat16 else x
        grad = grads[0].to(wide.dtype)
        normed = wide * scale
        product = grad * normed
        dims = tuple(range(x.dim() - 1))
        grad_weight = product.sum(dims).to(weight.dtype)
        mean = (product @ weight.to(wide.dtype)).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = torch.mul(grad, weight, out=product).sub_(normed.mul_(mean)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class RmsNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last dim. Source: arXiv:1910.07467."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim of ``x``; same shape and dtype out."""
        out: Tensor = _RmsNorm.apply(x, local(self.weight), self.eps)
        return out
