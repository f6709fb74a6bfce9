"""The head's loss against cross_entropy in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from equipoise.nn import loss
from equipoise.nn.loss import IGNORED, head_loss

D, V = 6, 11
LABELS = st.lists(st.one_of(st.just(IGNORED), st.integers(0, V - 1)), max_size=60)


def gradients(value: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(3.5 * value, weights)


# 1 byte makes chunks of 16 tokens, the least; the default takes all of them at once.
@settings(deadline=None, max_examples=20)
@given(LABELS, st.sampled_from([1, 8 << 20]))
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_cross_entropy(
    dtype: torch.dtype, bound: float, labels: list[int], chunk_bytes: int
) -> None:
    tokens = len(labels)
    x_TD = (5 * torch.randn(tokens, D)).to(dtype).requires_grad_()
    head_VD = torch.randn(V, D).to(dtype).requires_grad_()
    labels_T = torch.tensor(labels, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "_CHUNK_BYTES", chunk_bytes)
        found = head_loss(x_TD, head_VD, labels_T)
    wide = [x.detach().double().requires_grad_() for x in (x_TD, head_VD)]
    expected = cross_entropy(wide[0] @ wide[1].t(), labels_T, ignore_index=IGNORED, reduction="sum")
    assert found.dtype == dtype
    assert (found - expected).abs() <= bound * max(1.0, float(expected.detach()))
    for mine, theirs in zip(
        gradients(found, x_TD, head_VD), gradients(expected, *wide), strict=True
    ):
        assert mine.dtype == dtype
        if mine.numel():
            scale = max(1.0, float(theirs.abs().max()))
            assert (mine - theirs).abs().max() <= bound * scale


@pytest.mark.parametrize("labels", [[], [IGNORED] * 20])
def test_nothing_to_predict_gives_exact_zeros(labels: list[int]) -> None:
    x_TD = torch.randn(len(labels), D, requires_grad=True)
    head_VD = torch.randn(V, D, requires_grad=True)
    found = head_loss(x_TD, head_VD, torch.tensor(labels, dtype=torch.int64))
    assert float(found.detach()) == 0.0
    assert not any(grad.any() for grad in gradients(found, x_TD, head_VD))


@pytest.mark.parametrize("tokens", [15, 16, 17, 32, 33])
def test_chunks_change_rounding_alone(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x_TD = torch.randn(tokens, D, dtype=torch.float64, requires_grad=True)
    head_VD = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    labels_T = torch.randint(V, (tokens,))
    whole = head_loss(x_TD, head_VD, labels_T)
    monkeypatch.setattr(loss, "_CHUNK_BYTES", 1)
    chunked = head_loss(x_TD, head_VD, labels_T)
    torch.testing.assert_close(chunked, whole, rtol=1e-14, atol=0)
    for mine, theirs in zip(
        gradients(chunked, x_TD, head_VD), gradients(whole, x_TD, head_VD), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_logits_too_large_for_exp_are_no_trouble() -> None:
    x_TD = torch.full((2, 1), 1e4)
    head_VD = torch.tensor([[1.0], [-1.0]])
    found = head_loss(x_TD, head_VD, torch.tensor([0, 1]))
    assert float(found) == 2e4


def test_no_gradient_is_made_where_none_is_wanted() -> None:
    with torch.no_grad():
        found = head_loss(torch.randn(3, D), torch.randn(V, D), torch.tensor([1, 2, 3]))
    assert not found.requires_grad
