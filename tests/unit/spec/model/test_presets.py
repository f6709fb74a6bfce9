"""Counts of a model's weights: published totals, active ones, and layers of two kinds."""

import dataclasses

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.model.presets import PLANNED, PRESETS, ModelSpec, preset

SPARSE = ModelSpec(
    layers=4,
    hidden=16,
    heads=2,
    kv_heads=1,
    ffn=24,
    vocab=61,
    head_width=8,
    experts=6,
    top_k=2,
    expert_ffn=8,
)


@pytest.mark.parametrize(
    ("name", "params", "active"),
    [
        # 46.7B and 12.9B: arXiv:2401.04088. 57.4B and 14.2B: arXiv:2407.10671, table 1.
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
        ("qwen2-57b-a14b", 57_408_658_944, 14_249_270_784),
        ("llama3-8b", 8_030_261_248, 8_030_261_248),
        # 141B and 39B: mistral.ai/news/mixtral-8x22b.
        ("mixtral-8x22b", 140_630_071_296, 39_161_468_928),
    ],
)
def test_presets_have_their_published_sizes(name: str, params: int, active: int) -> None:
    model = preset(name)
    assert (model.params, model.active_params) == (params, active)


def test_models_that_are_planned_alone_have_their_published_sizes() -> None:
    # 671B and 37B: arXiv:2412.19437. The published 174.6B of GPT-3 count the same vocabulary.
    latent, plain = PLANNED["deepseek-v3"], PLANNED["gpt3-175b"]
    assert (latent.params, latent.active_params) == (671_026_404_352, 37_552_282_624)
    assert (latent.score_width, latent.attention_params) == (192, 187_105_280)
    assert (plain.params, plain.products) == (174_577_692_672, 2)
    assert not {"deepseek-v3", "gpt3-175b"} & set(PRESETS)


def test_the_small_sparse_preset_multiplies_a_token_as_often_as_the_small_dense_one() -> None:
    sparse, dense = preset("moe-3m"), preset("2m")
    assert sparse.params > 1.9 * dense.params
    assert sparse.matmul_params == dense.matmul_params + 4 * 8 * 128  # the routers


def test_layers_are_sparse_by_number() -> None:
    late = dataclasses.replace(SPARSE, layers=7, dense_layers=2, expert_every=2)
    assert [late.is_sparse(layer) for layer in range(7)] == [
        False,
        False,
        False,
        True,
        False,
        True,
        False,
    ]
    assert (late.sparse_layers, SPARSE.sparse_layers, preset("7m").sparse_layers) == (2, 4, 0)


def test_counts_of_layers_add_up() -> None:
    mixed = dataclasses.replace(SPARSE, dense_layers=1, shared_ffn=12, shared_gate=True)
    attention = 16 * 8 * 6
    shared = 3 * 16 * 12
    dense, router, expert = attention + 3 * 16 * 24, 16 * 7, 3 * 16 * 8
    assert mixed.count_layer(sparse=False, active=False) == dense
    assert mixed.count_layer(sparse=True, active=False) == attention + router + 6 * expert + shared
    assert mixed.count_layer(sparse=True, active=True) == attention + router + 2 * expert + shared
    layers = dense + 3 * (attention + router + 2 * expert + shared)
    assert mixed.matmul_params == layers + 16 * 61
    assert mixed.layer_matmul_params == layers // 4
    assert mixed.break_even_tokens == layers / (4 * 16)
    assert mixed.layer_params == 32 + attention + router + 6 * expert + shared
    away = 3 * 4 * expert
    assert mixed.params - mixed.active_params == away


def test_every_preset_holds_at_least_what_a_token_passes_through() -> None:
    for model in PRESETS.values():
        assert model.matmul_params < model.active_params <= model.params
        assert (model.active_params < model.params) == (model.experts > 0)


def test_a_narrower_model_has_narrower_experts() -> None:
    narrow = preset("mixtral-8x7b").scaled(layers=2, hidden=256)
    assert (narrow.hidden, narrow.ffn, narrow.expert_ffn, narrow.shared_ffn) == (256, 896, 896, 0)
    with pytest.raises(SpecError) as caught:
        preset("mixtral-8x7b").scaled(hidden=100)
    assert str(caught.value) == (
        "A width of 100 does not divide over 32 heads of an even width. Nearest that does: 64."
    )
