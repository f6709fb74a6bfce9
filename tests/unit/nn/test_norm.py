"""The norm's backward by finite differences, and its dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.nn.norm import RmsNorm


@settings(deadline=None, max_examples=10)
@given(st.sampled_from([(3, 8), (2, 3, 4), (1, 1), (0, 5)]), st.sampled_from([1e-6, 1e-2]))
def test_gradcheck(shape: tuple[int, ...], eps: float) -> None:
    norm = RmsNorm(shape[-1], eps).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True)

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(norm, {"weight": weight}, (x,))
        return out

    assert torch.autograd.gradcheck(call, (x, weight))
    expected = torch.nn.functional.rms_norm(x, shape[-1:], weight, eps)
    torch.testing.assert_close(call(x, weight), expected)


def test_a_row_of_zeros_has_finite_gradients() -> None:
    norm = RmsNorm(4, 1e-5)
    x = torch.zeros(2, 4, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtype_stays(dtype: torch.dtype) -> None:
    norm = RmsNorm(64, 1e-5).to(dtype)
    x = (100 * torch.randn(5, 64, dtype=torch.float64)).to(dtype).requires_grad_()
    out = norm(x)
    out.sum().backward()
    assert x.grad is not None and norm.weight.grad is not None
    assert {out.dtype, x.grad.dtype, norm.weight.grad.dtype} == {dtype}
    expected = torch.nn.functional.rms_norm(x.detach().double(), (64,), eps=1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
