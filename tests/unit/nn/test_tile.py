"""Tiles: parts of attention, merged, equal the whole, forward and backward."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from equipoise.base.errors import LayoutError
from equipoise.nn.attention import attend_documents
from equipoise.nn.tile import (
    attend_tile,
    attend_tile_backward,
    merge_tile_,
    sink_gradient,
    sink_tile_,
    sum_dtype,
)
from equipoise.nn.tile_cuda import backward_cuda, forward_cuda
from equipoise.nn.tile_plain import backward_plain, forward_plain


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_window_is_causal_and_anticausal_squares(dtype: torch.dtype) -> None:
    """Queries 4:8 of a window of 4 read keys 4:8 from below, and 1:4 from above."""
    q, grad_o = (torch.randn(4, 6, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(7, 2, 8, dtype=torch.float64) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    query, key = torch.arange(4, 8)[:, None], torch.arange(1, 8)
    scores = torch.einsum("qhe,khe->hqk", leaves[0], leaves[1].repeat_interleave(3, 1)) / 8**0.5
    scores = scores.masked_fill((key > query) | (key <= query - 4), float("-inf"))
    wanted = torch.einsum("hqk,khe->qhe", scores.softmax(2), leaves[2].repeat_interleave(3, 1))
    wanted_grads = torch.autograd.grad(wanted, leaves, grad_o)

    q, k, v, grad_o = (x.to(dtype) for x in (q, k, v, grad_o))
    tiles = [(slice(0, 4), slice(3, 7), "causal"), (slice(0, 3), slice(0, 3), "anticausal")]
    o = torch.zeros(4, 6, 8, dtype=dtype)
    lse = torch.full((4, 6), float("-inf"), dtype=dtype)
    for queries, keys, kind in tiles:
        merge_tile_(o[queries], lse[queries], *attend_tile(q[queries], k[keys], v[keys], kind))
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for queries, keys, kind in tiles:
        given = (x[rows] for x, rows in ((grad_o, queries), (q, queries), (k, keys), (v, keys)))
        parts = attend_tile_backward(*given, o[queries], lse[queries], kind)
        for grad, part, rows in zip(grads, parts, (queries, keys, keys), strict=True):
            grad[rows] += part
    bound = 1e-13 if dtype == torch.float64 else 2e-6
    for found, right in zip((o, *grads), (wanted, *wanted_grads), strict=True):
        assert (found.double() - right).abs().max() <= bound * right.abs().max()


def test_why_no_row_of_a_tile_may_be_without_a_key() -> None:
    """The trap: aten's log-sum-exp of such a row is 0, as if there were a key of score 0."""
    q, k = (torch.randn(1, 1, 3, 4) for _ in range(2))
    mask = torch.zeros(3, 3).index_fill(0, torch.tensor(1), float("-inf"))
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = operator(q, k, k, 0.0, False, attn_mask=mask)
    assert lse[0, 0, 1] == 0.0
    # Merged into what another tile found, it takes weight from it.
    o, found = torch.ones(1, 1, 4), torch.zeros(1, 1)
    merge_tile_(o, found, out[0, :, 1:2], lse[0, :, 1:2])
    assert torch.equal(o, torch.full((1, 1, 4), 0.5))


def test_a_row_that_no_tile_has_written_takes_the_first_whole() -> None:
    q, k, v = (torch.randn(3, 2, 4) for _ in range(3))
    part, part_lse = attend_tile(q, k, v, "causal")
    o, lse = torch.zeros(3, 2, 4), torch.full((3, 2), float("-inf"))
    merge_tile_(o, lse, part, part_lse)
    assert torch.equal(o, part)
    assert torch.equal(lse, part_lse)


def test_a_backward_pass_by_the_tiles_own_log_sum_exp_is_wrong() -> None:
    """The trap: output and log-sum-exp must be over all keys, not over the tile's."""
    q, grad_o = (torch.randn(5, 1, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(9, 1, 8, dtype=torch.float64) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = leaves[0][:, 0] @ leaves[1][:, 0].T / 8**0.5
    whole, lse = (scores.softmax(1) @ leaves[2][:, 0])[:, None], scores.logsumexp(1)[:, None]
    wanted = torch.autograd.grad(whole, leaves, grad_o)
    tiles = [slice(0, 4), slice(4, 9)]
    local = [attend_tile(q, k[keys], v[keys], "full") for keys in tiles]
    for by_tile, is_right in (
        ([(whole.detach(), lse.detach())] * 2, True),
        (local, False),
        ([(whole.detach(), part_lse) for _, part_lse in local], False),
        ([(part, lse.detach()) for part, _ in local], False),
    ):
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        for keys, (o, tile_lse) in zip(tiles, by_tile, strict=True):
            parts = attend_tile_backward(grad_o, q, k[keys], v[keys], o, tile_lse, "full")
            for grad, part, rows in zip(grads, parts, (slice(None), keys, keys), strict=True):
                grad[rows] += part
        error = max(float((x - y).abs().max()) for x, y in zip(grads, wanted, strict=True))
        assert error < 1e-13 if is_right else error > 1e-2


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
        "Tiles of kind anticausal must be square, but this one has 3 queries and 5 keys. Give it "
        "as many keys as queries."
    )


def test_tensors_on_another_device() -> None:
    q = torch.zeros(3, 1, 4, device="meta")
    with pytest.raises(LayoutError) as caught:
        attend_tile(q, q, q, "causal")
    assert str(caught.value) == (
        "Attention in parts runs on CPU and CUDA; the queries are on meta. Use data parallelism "
        "on that device."
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_plain_products_are_the_flash_operator(dtype: torch.dtype, tokens: int) -> None:
    """What fp32 runs by on devices whose flash operators take bf16 alone."""
    q, grad_o = (torch.randn(tokens, 6, 8, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(tokens, 2, 8, dtype=dtype) for _ in range(2))
    for kind in ("causal", "full"):
        o, lse = attend_tile(q, k, v, kind)
        plain = forward_plain(q, k, v, kind == "causal", 0.0)
        wanted = attend_tile_backward(grad_o, q, k, v, o, lse, kind)
        grads = backward_plain(grad_o, q, k, v, *plain, kind == "causal", 0.0)
        bound = 1e-13 if dtype == torch.float64 else 5e-6
        for one, other in zip((*plain, *grads), (o, lse, *wanted), strict=True):
            assert (one - other).abs().max() <= bound * other.abs().max().clamp(min=1)


def test_the_operator_of_cuda_gives_outputs_of_these_shapes() -> None:
    """By torch's own description of its shapes: no device is needed."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k = (
            torch.zeros(tokens, heads, 16, dtype=torch.bfloat16, device="cuda")
            for tokens, heads in ((3, 4), (5, 2))
        )
        out, lse = forward_cuda(q, k, k, False)
        found = backward_cuda(out, q, k, k, out, lse, False)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:2])
    assert [each.shape for each in found] == [q.shape, k.shape, k.shape]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "cut"), [(23, 9), (900, 40)])
def test_capped_parts_with_a_sink_are_the_whole(dtype: torch.dtype, tokens: int, cut: int) -> None:
    heads, cap = 6, 1.5  # scores of 860 tokens take more than one chunk
    q, grad_o = (3 * torch.randn(tokens, heads, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(tokens, 2, 8, dtype=torch.float64) for _ in range(2))
    q, k, v, grad_o, sinks = (x.to(dtype) for x in (q, k, v, grad_o, torch.randn(heads)))
    leaves = [x.double().requires_grad_() for x in (q, k, v, sinks)]
    scores = torch.einsum("qhe,khe->hqk", leaves[0], leaves[1].repeat_interleave(3, 1)) / 8**0.5
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    scores = (cap * torch.tanh(scores / cap)).masked_fill(hidden, float("-inf"))
    with_sink = torch.cat([scores, leaves[3][:, None, None].expand(-1, tokens, 1)], 2)
    shares = with_sink.softmax(2)[..., :tokens]
    wanted = torch.einsum("hqk,khe->qhe", shares, leaves[2].repeat_interleave(3, 1))
    wanted_grads = torch.autograd.grad(wanted, leaves, grad_o.double())

    wide = sum_dtype(dtype)
    o = torch.zeros(tokens, heads, 8, dtype=wide)
    lse = torch.full((tokens, heads), float("-inf"), dtype=wide)
    first, second = slice(0, cut), slice(cut, tokens)
    tiles = [(second, first, "full"), (first, first, "causal"), (second, second, "causal")]
    for queries, keys, kind in tiles:
        part = attend_tile(q[queries], k[keys], v[keys], kind, softcap=cap)
        merge_tile_(o[queries], lse[queries], *part)
    sink_tile_(o, lse, sinks.to(wide))
    grads = [torch.zeros_like(x, dtype=wide) for x in (q, k, v)]
    for queries, keys, kind in tiles:
        parts = attend_tile_backward(
            *(x[rows] for x, rows in ((grad_o, queries), (q, queries), (k, keys), (v, keys))),
            o[queries],
            lse[queries],
            kind,
            softcap=cap,
        )
        for grad, part, rows in zip(grads, parts, (queries, keys, keys), strict=True):
            grad[rows] += part
    grads.append(sink_gradient(grad_o, o, lse, sinks.to(wide)))
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    for actual, right in zip((o, *grads), (wanted, *wanted_grads), strict=True):
        assert (actual.double() - right).abs().max() <= bound * right.abs().max()
