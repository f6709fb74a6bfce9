"""Chunks that attend by products of pairs: a softmax, however a text is cut and stored."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.nn.tile import attend_tile, merge_tile_
from equipoise.schedule.attention.schedule import TileKind
from equipoise.schedule.batching.iteration import PageRun, ServeChunk
from equipoise.serve.engine.chunks.rows import PairedChunk, attend_pairs, tile_attention
from equipoise.serve.engine.chunks.shares import TILE, share_line, share_seen
from equipoise.serve.engine.jit import compile_rows
from equipoise.serve.engine.pool import KvPool
from equipoise.serve.engine.products.dot import LANES, LINES, dot_pairs, multiplies_pairs
from equipoise.spec.model.presets import preset

pytestmark = pytest.mark.skipif(
    not multiplies_pairs(), reason="this processor does not multiply pairs of bf16"
)

PAGE = 16


def pool_of(heads: int, width: int, pages: int, dtype: torch.dtype = torch.bfloat16) -> KvPool:
    model = dataclasses.replace(
        preset("7m"), layers=1, heads=heads, kv_heads=heads, head_width=width
    )
    pool = KvPool(model, pages=pages, page_tokens=PAGE, dtype=dtype, device=torch.device("cpu"))
    pool.keys(0).fill_(3e38)  # what nobody wrote may be anything finite
    pool.values(0).fill_(3e38)
    return pool


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, start: int, cuts: list[int], threads: int, seed: int
) -> Tensor:
    """Outputs of the tokens from ``start`` on, chunk by chunk, from pages in random order."""
    needed = -(-len(k) // PAGE)
    order = np.random.default_rng(seed).permutation(needed + 2)[:needed].tolist()
    pool = pool_of(k.shape[1], k.shape[2], needed + 2)
    runs = tuple(PageRun(page, 1) for page in order)
    rows = pool.row_numbers(order, 0, len(k))
    pool.keys(0)[rows], pool.values(0)[rows] = k, v
    before, out = torch.get_num_threads(), torch.empty_like(q)
    torch.set_num_threads(threads)
    try:
        edges = [start, *(start + cut for cut in cuts), len(k)]
        for first, last in itertools.pairwise(edges):
            chunk = ServeChunk("", first, last - first, runs, samples=False, logits=0)
            paired = PairedChunk(slice(first - start, last - start), chunk, pool)
            paired.attend(q, pool.keys(0), pool.values(0), out)
    finally:
        torch.set_num_threads(before)
    return out


def exact(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    return softmax(q, k, v, torch.arange(len(k)) > torch.arange(start, len(k))[:, None])[0]


def softmax(q: Tensor, k: Tensor, v: Tensor, unseen: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, with its log-sum-exp."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("the,she->hts", q.double(), keys) * q.shape[2] ** -0.5
    scores.masked_fill_(unseen, -torch.inf)
    o = torch.einsum("hts,she->the", scores.softmax(dim=-1), values)
    return o, scores.logsumexp(dim=-1).T


def draw(tokens: int, rows: int, heads: int, kv_heads: int, width: int, seed: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    sizes = (rows, heads), (tokens, kv_heads), (tokens, kv_heads)
    return [torch.randn(*size, width, generator=source).bfloat16() for size in sizes]


@settings(max_examples=12, deadline=None)
@given(
    st.tuples(st.integers(0, 300), st.integers(1, 140)),
    st.sampled_from([(9, 3, 64), (4, 4, 128), (8, 1, 64)]),
    st.lists(st.integers(1, 139), max_size=2, unique=True).map(sorted),
    st.integers(1, 2),
    st.integers(0, 9),
)
def test_outputs_are_those_of_a_softmax(
    sizes: tuple[int, int],
    heads: tuple[int, int, int],
    cuts: list[int],
    threads: int,
    seed: int,
) -> None:
    start, rows = sizes
    q, k, v = draw(start + rows, rows, *heads, seed)
    how = {"start": start, "cuts": [cut for cut in cuts if cut < rows]}
    outputs = attend(q, k, v, **how, threads=threads, seed=seed)
    # A share and the output are each rounded to 8 bits.
    assert (outputs.double() - exact(q, k, v, start)).abs().max() < 2**-8 * 4
    again = attend(q, k, v, **how, threads=3 - threads, seed=seed + 1)
    assert torch.equal(outputs, again)


UNSEEN = {"full": None, "causal": 1, "anticausal": -1}
"""Whether keys after or before a query are not read."""


@settings(max_examples=12, deadline=None)
@given(
    st.tuples(st.integers(1, 140), st.integers(1, 300)),
    st.sampled_from([(9, 3, 64), (4, 4, 128), (8, 1, 64)]),
    st.sampled_from(sorted(UNSEEN)),
    st.integers(0, 9),
)
def test_tiles_of_every_kind_have_the_log_sum_exp_of_their_scores(
    sizes: tuple[int, int], heads: tuple[int, int, int], kind: TileKind, seed: int
) -> None:
    rows, tokens = sizes if kind == "full" else (sizes[0], sizes[0])
    q, k, v = draw(tokens, rows, *heads, seed)
    side = UNSEEN[kind]
    at = torch.arange(rows)[:, None], torch.arange(tokens)
    unseen = (at[1] - at[0]) * side > 0 if side else torch.zeros(rows, tokens, dtype=torch.bool)
    o, lse = attend_pairs(q, k, v, kind)
    exact_o, exact_lse = softmax(q, k, v, unseen)
    assert (o.dtype, lse.dtype) == (torch.float32 if rows > 8 else o.dtype, torch.float32)
    # Scores are products of bf16 summed in fp32; shares are rounded to 8 bits.
    assert (lse - exact_lse).abs().max() < 1e-4
    assert (o.double() - exact_o).abs().max() < 2**-8 * 4


@settings(max_examples=7, deadline=None)
@given(
    st.lists(st.integers(1, 200), min_size=2, max_size=5),
    st.integers(9, 100),
    st.sampled_from([(9, 3, 64), (8, 1, 64)]),
    st.integers(0, 9),
)
def test_parts_merged_are_the_whole(
    parts: list[int], rows: int, heads: tuple[int, int, int], seed: int
) -> None:
    """As ranks merge what each has computed over its keys, in whatever order they come."""
    q, k, v = draw(sum(parts) + rows, rows, *heads, seed)
    merged, lse = attend_pairs(q, k[-rows:], v[-rows:], "causal")
    order = np.random.default_rng(seed).permutation(len(parts))
    tiles = list(zip(k[:-rows].split(parts), v[:-rows].split(parts), strict=True))
    for at in order:
        merge_tile_(merged, lse, *attend_pairs(q, *tiles[at], "full"))
    whole = exact(q, k, v, sum(parts))
    assert (merged.double() - whole).abs().max() < 2**-8 * 4
    in_torch, lse_in_torch = attend_tile(q, k[-rows:], v[-rows:], "causal")
    in_torch, lse_in_torch = in_torch.float(), lse_in_torch.clone()
    for at in order:
        merge_tile_(in_torch, lse_in_torch, *attend_tile(q, *tiles[at], "full"))
    error, bound = ((x.double() - whole).square().mean() for x in (merged, in_torch))
    assert error < 1.2 * bound
    assert (lse - lse_in_torch).abs().max() < 2e-4


def test_pairs_compute_tiles_in_bf16_with_heads_of_whole_blocks_alone() -> None:
    assert tile_attention(pool_of(3, 64, 1)) is attend_pairs
    assert tile_attention(pool_of(3, 32, 1)) is attend_tile
    assert tile_attention(pool_of(3, 64, 1, torch.float32)) is attend_tile


def test_it_is_as_near_to_a_softmax_as_torch_in_bf16() -> None:
    q, k, v = draw(400, 400, 9, 3, 64, seed=1)
    mine = attend(q, k, v, start=0, cuts=[], threads=1, seed=0)
    theirs, _ = attend_tile(q, k, v, "causal")
    error, bound = ((x.double() - exact(q, k, v, 0)).square().mean() for x in (mine, theirs))
    assert error < 1.1 * bound


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    q, k, v = draw(2 * TILE, 2 * TILE, 4, 4, 64, seed=2)
    q, k = q * 30, k * 30
    outputs = attend(q, k, v, start=0, cuts=[], threads=1, seed=0)
    assert (outputs.double() - exact(q, k, v, 0)).abs().max() < 2**-8 * 4


def test_what_is_not_a_number_stays_so_and_reaches_no_chunk_before_it() -> None:
    q, k, v = draw(100, 100, 4, 4, 64, seed=3)
    k[50], v[70] = torch.nan, torch.nan
    outputs = attend(q, k, v, start=0, cuts=[50], threads=1, seed=0)
    assert outputs[:50].isfinite().all()
    assert outputs[50:].isnan().all()


@compile_rows()
def _dot(a: object, b: object, pairs: int, c: object) -> None:
    dot_pairs(a, 0, pairs, b, 0, LANES, pairs, c)


@pytest.mark.parametrize("pairs", [1, 2, 33])
def test_a_block_is_products_summed(pairs: int) -> None:
    source = torch.Generator().manual_seed(pairs)
    a = torch.randn(LINES, 2 * pairs, generator=source).bfloat16()
    b = torch.randn(2 * pairs, LANES, generator=source).bfloat16()
    c = np.empty((LINES, LANES), np.float32)
    bits = b.view(torch.uint16).numpy().astype(np.uint32)
    _dot(a.view(torch.uint16).numpy(), bits[0::2] | bits[1::2] << 16, pairs, c)
    assert np.abs(c - (a.double() @ b.double()).numpy()).max() < 1e-5


@compile_rows()
def _share(
    scores: object, line: int, scale: float, seen: int, most: float, shares: object
) -> object:
    if seen >= TILE:
        return share_line(scores, line, np.float32(scale), seen, np.float32(most), shares)
    return share_seen(scores, line, np.float32(scale), seen, np.float32(most), shares)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, LINES - 1),
    st.integers(1, TILE),
    st.floats(0.01, 10.0),
    st.sampled_from([-1e30, 3.0]),
    st.integers(0, 9),
)
def test_shares_are_powers_of_two_below_the_largest_score_that_is_seen(
    line: int, seen: int, spread: float, most: float, seed: int
) -> None:
    scores = np.random.default_rng(seed).normal(0, spread, (2, LINES, LANES)).astype(np.float32)
    shares = np.full((LINES, TILE), 7, np.uint16)
    largest, total = _share(scores, line, 0.5, seen, most, shares)
    scaled = scores[:, line].ravel()[:seen].astype(np.float64) * 0.5
    assert largest == np.float32(max(scaled.max(), most))
    exact = 2 ** (scaled - largest)
    assert abs(total / exact.sum() - 1) < 4e-7
    got = torch.from_numpy(shares[line]).view(torch.bfloat16).double().numpy()
    assert (abs(got[:seen] / exact - 1) <= 2**-8)[exact > 2**-126].all()
    assert not got[:seen][exact < 2**-140].any()
    assert not got[seen:].any()
    assert (shares[np.arange(LINES) != line] == 7).all()
