"""Counts of work against counting one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from equipoise.cost.work import causal_pairs, pack_flop, pair_flop, useful_flop
from equipoise.nn.decoder import Decoder
from equipoise.spec.model import ModelSpec

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


def test_a_pack_is_its_tokens_and_its_pairs() -> None:
    lengths = np.array([5, 1, 9])
    pairs = sum(n * (n + 1) // 2 for n in (5, 1, 9))
    assert pack_flop(MODEL, lengths) == useful_flop(MODEL, 15, pairs)
    assert useful_flop(MODEL, 15, pairs) == 6 * MODEL.matmul_params * 15 + 3 * pairs * pair_flop(
        MODEL
    )
    assert pack_flop(MODEL, np.zeros(0, dtype=np.int64)) == 0
