"""Tiles: parts of attention, merged, equal the whole, forward and backward."""

import pytest
import torch

from equipoise.base.errors import LayoutError
from equipoise.nn.attention import attend_documents
from equipoise.nn.tile import attend_tile, attend_tile_backward, merge_tile_, sum_dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (3, 1)])
def test_parts_are_the_whole(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    tokens, cut = 23, 9
    q, grad_o = (torch.randn(tokens, heads, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(tokens, kv_heads, 8, dtype=torch.float64) for _ in range(2))
    q, k, v, grad_o = (x.to(dtype).double() for x in (q, k, v, grad_o))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = attend_documents(*leaves, [tokens])
    wanted_grads = torch.autograd.grad(wanted, leaves, grad_o)

    q, k, v, grad_o = (x.to(dtype) for x in (q, k, v, grad_o))
    o = torch.zeros(tokens, heads, 8, dtype=sum_dtype(dtype))
    lse = torch.full((tokens, heads), float("-inf"), dtype=o.dtype)
    first, second = slice(0, cut), slice(cut, tokens)
    tiles = [(second, first, "full"), (first, first, "causal"), (second, second, "causal")]
    for queries, keys, kind in tiles:
        part, part_lse = attend_tile(q[queries], k[keys], v[keys], kind)
        merge_tile_(o[queries], lse[queries], part, part_lse)
    grads = [torch.zeros_like(x, dtype=o.dtype) for x in (q, k, v)]
    for queries, keys, kind in tiles:
        parts = attend_tile_backward(
            grad_o[queries],
            q[queries],
            k[keys],
            v[keys],
            o[queries].to(dtype),
            lse[queries],
            kind,
        )
        for grad, part, rows in zip(grads, parts, (queries, keys, keys), strict=True):
            grad[rows] += part
    bound = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for found, right in zip((o, *grads), (wanted, *wanted_grads), strict=True):
        assert (found.double() - right).abs().max() <= bound * right.abs().max()


def test_log_sum_exp_is_that_of_the_scores() -> None:
    q, k, v = (torch.randn(n, 1, 4, dtype=torch.float64) for n in (3, 5, 5))
    _, lse = attend_tile(q, k, v, "full")
    scores = q[:, 0] @ k[:, 0].T / 2
    assert torch.allclose(lse[:, 0], scores.logsumexp(1))


def test_a_tile_that_is_not_square() -> None:
    q, k = torch.zeros(3, 1, 4), torch.zeros(5, 1, 4)
    with pytest.raises(LayoutError) as caught:
        attend_tile(q, k, k, "anticausal")
    assert str(caught.value) == (
        "A tile of kind anticausal has 3 queries and 5 keys. Give it as many keys as queries."
    )


def test_tensors_on_another_device() -> None:
    q = torch.zeros(3, 1, 4, device="meta")
    with pytest.raises(LayoutError) as caught:
        attend_tile(q, q, q, "causal")
    assert str(caught.value) == (
        "Attention in parts runs on CPU, the queries are on meta. Train with data parallelism "
        "there."
    )
