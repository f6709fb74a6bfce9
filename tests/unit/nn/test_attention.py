"""Attention against a masked softmax in float64; documents never see each other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.nn.attention import attend_documents

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def draw(
    lengths: list[int], heads: int, kv_heads: int, width: int, dtype: torch.dtype, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(sum(lengths), each, width, dtype=torch.float64, generator=generator)
        .to(dtype)
        .requires_grad_()
        for each in (heads, kv_heads, kv_heads, heads)
    ]


def masked_softmax(q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, lengths: list[int]) -> Tensor:
    """The definition: one dense mask over the whole pack."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    order = torch.arange(sum(lengths))
    mask_TT = (document[:, None] == document) & (order[:, None] >= order)
    share = q_THE.shape[1] // k_TGE.shape[1]
    k_THE, v_THE = (x.repeat_interleave(share, 1) for x in (k_TGE, v_TGE))
    scores = torch.einsum("the,she->hts", q_THE, k_THE) / math.sqrt(q_THE.shape[2])
    weights = scores.masked_fill(~mask_TT, -math.inf).softmax(-1)
    return torch.einsum("hts,she->the", weights, v_THE)


@settings(deadline=None, max_examples=12)
@given(LENGTHS, st.sampled_from([(1, 1), (4, 4), (6, 2), (4, 1)]), st.sampled_from([8, 16, 20]))
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_a_masked_softmax(
    dtype: torch.dtype, bound: float, lengths: list[int], heads: tuple[int, int], width: int
) -> None:
    *qkv, grad = draw(lengths, *heads, width, dtype)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    out = attend_documents(*qkv, lengths)
    expected = masked_softmax(*wide, lengths)
    out.backward(grad)
    expected.backward(grad.double())
    assert (out.double() - expected).abs().max() <= bound * expected.abs().max()
    # One scale for all three: the gradients of a one-token document's q and k are exactly 0.
    scale = max(x.grad.abs().max() for x in wide if x.grad is not None)
    for mine, theirs in zip(qkv, wide, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert (mine.grad.double() - theirs.grad).abs().max() <= bound * scale


@settings(deadline=None, max_examples=12)
@given(LENGTHS, LENGTHS)
def test_a_document_is_bitwise_what_it_is_without_the_others(
    before: list[int], after: list[int]
) -> None:
    length = 17
    lengths = [*before, length, *after]
    start, stop = sum(before), sum(before) + length
    runs = []
    for seed in (1, 2):
        *qkv, grad = draw(lengths, 4, 2, 16, torch.float32, seed)
        own = draw([length], 4, 2, 16, torch.float32, seed=3)
        with torch.no_grad():
            for x, replaced in zip((*qkv, grad), own, strict=True):
                x[start:stop] = replaced
        out = attend_documents(*qkv, lengths)
        out.backward(grad)
        runs.append([out, *(x.grad for x in qkv)])
    *qkv, grad = draw([length], 4, 2, 16, torch.float32, seed=3)
    alone = attend_documents(*qkv, [length])
    alone.backward(grad)
    for first, second, single in zip(*runs, [alone, *(x.grad for x in qkv)], strict=True):
        assert first is not None and second is not None and single is not None
        assert torch.equal(first[start:stop], second[start:stop])
        assert torch.equal(first[start:stop], single)


def test_zero_tokens_are_legal() -> None:
    *qkv, grad = draw([0], 4, 2, 8, torch.float32)
    out = attend_documents(*qkv, [])
    out.backward(grad)
    assert out.shape == (0, 4, 8)
    assert [x.grad is not None and x.grad.shape == x.shape for x in qkv] == [True] * 3


def test_documents_of_zero_tokens_change_nothing() -> None:
    results = []
    for lengths in ([7, 5], [0, 7, 0, 0, 5, 0]):
        *qkv, grad = draw(lengths, 4, 2, 8, torch.float32)
        out = attend_documents(*qkv, lengths)
        results.append([out, *torch.autograd.grad(out, qkv, grad)])
    assert all(map(torch.equal, *results))


def test_wrong_lengths_are_refused() -> None:
    *qkv, _ = draw([5], 4, 2, 8, torch.float32)
    with pytest.raises(ValueError) as caught:
        attend_documents(*qkv, [3, 1])
    assert str(caught.value) == (
        "The 2 documents hold 4 tokens, the pack 5: pass the length of every document of the pack."
    )
