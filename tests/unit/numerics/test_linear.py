"""Float8 layers: their outputs and gradients are the formulas on rounded operands."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from equipoise.nn.project import FP8, PLAIN
from equipoise.numerics.fp8 import round_rows


def draw(*shapes: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def rounded(x: Tensor) -> Tensor:
    return round_rows(x.detach()).restore()


def times(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right.T``, both rounded along what they contract."""
    return rounded(left) @ rounded(right).t()


def near(one: Tensor | None, other: Tensor) -> None:
    assert one is not None
    torch.testing.assert_close(
        one, other, rtol=1e-5, atol=1e-5 * float(1 + other.detach().abs().max())
    )


@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_project(tokens: int) -> None:
    x, *weights = draw((tokens, 32), (48, 32), (16, 32), (16, 32))
    outs = FP8.project(x, *weights)
    grads = [torch.randn_like(out) for out in outs]
    torch.autograd.backward(outs, grads)
    near(x.grad, sum(times(g, w.t()) for g, w in zip(grads, weights, strict=True)))
    for out, grad, weight in zip(outs, grads, weights, strict=True):
        near(out, times(x, weight))
        near(weight.grad, times(grad.t(), x.t()))


@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_add_project(tokens: int) -> None:
    residual, x, weight = draw((tokens, 32), (tokens, 48), (32, 48))
    out = FP8.add_project(residual, x, weight)
    grad = torch.randn_like(out)
    out.backward(grad)
    near(out, residual + times(x, weight))
    near(residual.grad, grad)
    near(x.grad, times(grad, weight.t()))
    near(weight.grad, times(grad.t(), x.t()))


@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_add_swiglu(tokens: int) -> None:
    residual, x, gate, up, down = draw((tokens, 32), (tokens, 32), (48, 32), (48, 32), (32, 48))
    out = FP8.add_swiglu(residual, x, gate, up, down)
    grad = torch.randn_like(out)
    out.backward(grad)
    x_gate, x_up = times(x, gate).requires_grad_(), times(x, up).requires_grad_()
    hidden = silu(x_gate) * x_up
    near(out, residual + times(hidden, down))
    hidden.backward(times(grad, down.t()))
    assert x_gate.grad is not None and x_up.grad is not None
    near(residual.grad, grad)
    near(down.grad, times(grad.t(), hidden.t()))
    near(gate.grad, times(x_gate.grad.t(), x.t()))
    near(up.grad, times(x_up.grad.t(), x.t()))
    near(x.grad, times(x_gate.grad, gate.t()) + times(x_up.grad, up.t()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens_give_gradients_of_zero(dtype: torch.dtype) -> None:
    inputs = draw((0, 32), (0, 32), (48, 32), (48, 32), (32, 48), dtype=dtype)
    FP8.add_swiglu(*inputs).sum().backward()
    for each in inputs:
        assert each.grad is not None and each.grad.shape == each.shape and not each.grad.any()
    assert all(each.grad is not None and each.grad.dtype == dtype for each in inputs)


def test_frozen_weights_get_no_gradient() -> None:
    inputs = draw((3, 32), (3, 32), (48, 32), (48, 32), (32, 48))
    inputs[3].requires_grad_(False)
    FP8.add_swiglu(*inputs).sum().backward()
    assert [each.grad is None for each in inputs] == [False, False, False, True, False]


def test_float8_differs_from_the_plain_products_by_its_rounding_alone() -> None:
    inputs = draw((64, 32), (64, 32), (48, 32), (48, 32), (32, 48))
    plain, narrow = PLAIN.add_swiglu(*inputs), FP8.add_swiglu(*inputs)
    error = float((plain - narrow).detach().norm() / plain.detach().norm())
    assert 1e-3 < error < 0.08
