"""Counts of work against counting one by one."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from equipoise.base.errors import SpecError
from equipoise.cost.work import (
    Mask,
    causal_pairs,
    count_work,
    kv_bytes_per_token,
    pair_flop,
    pairs_before,
    slice_pairs,
    useful_flop,
)
from equipoise.nn.decoder import Decoder
from equipoise.spec.model.presets import LatentSpec, ModelSpec, WindowSpec

MODEL = ModelSpec(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=300, head_width=8)
TIED = ModelSpec(
    layers=3, hidden=32, heads=2, kv_heads=1, ffn=40, vocab=64, head_width=8, tied=True
)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_pairs_are_those_of_the_causal_mask(lengths: list[int]) -> None:
    masks = [int(np.tril(np.ones((tokens, tokens))).sum()) for tokens in lengths]
    assert causal_pairs(np.array(lengths)).tolist() == masks


def test_pairs_of_a_long_document_do_not_overflow() -> None:
    assert causal_pairs(np.array([3_000_000_000])).tolist() == [4_500_000_001_500_000_000]


def written_out(tokens: int, mask: Mask) -> np.ndarray:
    """The mask as a matrix, cell by cell, from its definition."""
    query, key = np.indices((tokens, tokens))
    if mask.kind == "full":
        return np.ones((tokens, tokens), dtype=bool)
    if mask.kind == "window":
        return (key <= query) & (query - key < mask.window_tokens)
    if mask.kind == "prefix":
        ends = mask.prefix_tokens + np.cumsum(mask.branch_tokens)
        branch = np.where(
            np.arange(tokens) < mask.prefix_tokens,
            -1,
            np.searchsorted(ends, np.arange(tokens), side="right"),
        )
        return (key <= query) & ((branch[key] == -1) | (branch[key] == branch[query]))
    return key <= query


@st.composite
def masks(draw) -> tuple[int, Mask]:
    kind = draw(st.sampled_from(["causal", "full", "window", "prefix"]))
    if kind == "prefix":
        prefix = draw(st.integers(0, 20))
        branches = draw(st.lists(st.integers(0, 12), max_size=4))
        mask = Mask("prefix", prefix_tokens=prefix, branch_tokens=tuple(branches))
        return prefix + sum(branches), mask
    window = draw(st.integers(1, 50)) if kind == "window" else 0
    return draw(st.integers(0, 40)), Mask(kind, window_tokens=window)


@given(masks(), st.integers(0, 52), st.integers(0, 52))
def test_pairs_of_a_slice_are_those_of_the_mask_written_out(drawn, one: int, other: int) -> None:
    tokens, mask = drawn
    start, stop = sorted((min(one, tokens), min(other, tokens)))
    rows = written_out(tokens, mask)[start:stop]
    found = slice_pairs(np.array([start]), np.array([stop]), np.array([tokens]), mask)
    assert found.tolist() == [int(rows.sum())]


@given(masks())
def test_work_counts_the_pairs_of_its_mask(drawn) -> None:
    tokens, mask = drawn
    work = count_work(np.array([tokens, tokens]), MODEL, mask=mask, element_bytes=4)
    pairs = 2 * int(written_out(tokens, mask).sum())
    assert (work.tokens, work.pairs) == (2 * tokens, pairs)
    assert work.flop == useful_flop(MODEL, 2 * tokens, pairs)
    # q and o of 4 heads, k and v of 2, 8 wide, 4 bytes, 2 layers
    assert work.bytes == 2 * tokens * (4 + 4 + 2 + 2) * 8 * 4 * 2


def test_a_window_of_no_tokens_is_refused() -> None:
    with pytest.raises(
        SpecError,
        match=re.escape(
            "A sliding window of 0 tokens reads no key. Set window_tokens to 1 or more."
        ),
    ):
        Mask("window")


def test_a_document_that_is_not_its_prefix_and_branches_is_refused() -> None:
    mask = Mask("prefix", prefix_tokens=10, branch_tokens=(3, 4))
    with pytest.raises(
        SpecError,
        match=re.escape(
            "A document has 1,018 tokens, but its mask has a prefix of 10 and branches of 7. Give "
            "every document 17 tokens, or each its own mask."
        ),
    ):
        pairs_before(np.array([17, 9]), np.array([17, 1018]), mask)


@pytest.mark.parametrize("model", [MODEL, TIED])
def test_matmul_weights_are_those_of_the_built_model(model: ModelSpec) -> None:
    decoder = Decoder(model)
    weights = sum(part.weight.numel() for part in decoder.modules() if isinstance(part, nn.Linear))
    if model.tied:
        weights += decoder.embed.weight.numel()
    assert model.matmul_params == weights
    assert model.params == sum(parameter.numel() for parameter in decoder.parameters())


def test_flop_of_a_pair_is_two_products_over_each_heads_width() -> None:
    assert pair_flop(MODEL) == sum(
        2 + 2 for _ in range(MODEL.layers * MODEL.heads * MODEL.head_width)
    )


def test_keys_and_values_of_a_token_are_two_rows_of_the_kv_heads() -> None:
    assert kv_bytes_per_token(MODEL) == (2 + 2) * 8 * 2


def test_work_counts_windows_and_the_wider_keys_of_latent_attention() -> None:
    lengths = np.array([5, 1, 9])
    windowed = dataclasses.replace(MODEL, window=WindowSpec(3, 1.0))
    pairs = [sum(min(n, 3) for n in range(1, tokens + 1)) for tokens in (5, 1, 9)]
    assert count_work(lengths, windowed).pairs == sum(pairs)
    full = Mask("full")
    assert count_work(lengths, windowed, mask=full).pairs == 25 + 1 + 81
    latent = dataclasses.replace(MODEL, latent=LatentSpec(4, 6, rope=2), kv_heads=MODEL.heads)
    keys, values = MODEL.heads * (MODEL.head_width + 2), MODEL.heads * MODEL.head_width
    assert kv_bytes_per_token(latent) == 2 * (keys + values)
    assert count_work(lengths, latent).bytes == 15 * MODEL.layers * 2 * 2 * (keys + values)
    attention = latent.heads * (latent.head_width + 1)
    assert latent.break_even_tokens * attention * latent.layers == pytest.approx(
        latent.matmul_params - latent.hidden * latent.vocab
    )


def test_a_pack_is_its_tokens_and_its_pairs() -> None:
    lengths = np.array([5, 1, 9])
    pairs = sum(n * (n + 1) // 2 for n in (5, 1, 9))
    assert count_work(lengths, MODEL).flop == useful_flop(MODEL, 15, pairs)
    assert useful_flop(MODEL, 15, pairs) == 6 * MODEL.matmul_params * 15 + 3 * pairs * pair_flop(
        MODEL
    )
    assert count_work(np.zeros(0, dtype=np.int64), MODEL).flop == 0
