"""Projections and the gated feed-forward: plain formulas, and gradients by differences."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from equipoise.nn.project import add_project, add_swiglu, project


def draw(*shapes: tuple[int, int]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_project(tokens: int) -> None:
    x, *weights = draw((tokens, 4), (6, 4), (2, 4), (2, 4))
    for out, weight in zip(project(x, *weights), weights, strict=True):
        torch.testing.assert_close(out, x @ weight.t())
    assert torch.autograd.gradcheck(project, (x, *weights))


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_add_project(tokens: int) -> None:
    residual, x, weight = draw((tokens, 4), (tokens, 6), (4, 6))
    torch.testing.assert_close(add_project(residual, x, weight), residual + x @ weight.t())
    assert torch.autograd.gradcheck(add_project, (residual, x, weight))


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_add_swiglu(tokens: int) -> None:
    residual, x, gate, up, down = draw((tokens, 4), (tokens, 4), (6, 4), (6, 4), (4, 6))
    expected = residual + (silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    torch.testing.assert_close(add_swiglu(residual, x, gate, up, down), expected)
    assert torch.autograd.gradcheck(add_swiglu, (residual, x, gate, up, down))


def test_a_second_layer_of_gradients_is_not_shared() -> None:
    """The backward writes in place; what it was given must stay as it was."""
    residual, x, gate, up, down = draw((3, 4), (3, 4), (6, 4), (6, 4), (4, 6))
    out = add_swiglu(residual, x, gate, up, down)
    grad = torch.randn_like(out)
    kept = grad.clone()
    first = torch.autograd.grad(out, (x, gate, up, down), grad, retain_graph=True)
    second = torch.autograd.grad(out, (x, gate, up, down), grad)
    assert torch.equal(grad, kept)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
