"""The memory forecast: its terms add up, and each moves the way that memory moves."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.cost.memory import MemoryForecast, forecast_memory
from equipoise.spec.model import ModelSpec, preset

MODEL = preset("7m")


SPARSE = preset("moe-3m")


def forecast(model: ModelSpec = MODEL, **changes) -> MemoryForecast:
    given_ = {
        "tokens": 4096,
        "ranks": 2,
        "zero": 1,
        "precision": "fp32",
        "recompute": "none",
    } | changes
    return forecast_memory(model, **given_)


@pytest.mark.parametrize(
    ("zero", "precision", "recompute"),
    list(itertools.product((0, 1, 2, 3), ("fp32", "bf16"), ("none", "full"))),
)
def test_terms_add_up_to_the_total_and_none_is_negative(zero, precision, recompute) -> None:
    found = forecast(zero=zero, precision=precision, recompute=recompute)
    assert found.total_bytes == sum(found.terms.values())
    assert all(isinstance(value, int) and value >= 0 for value in found.terms.values())


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.sampled_from((0, 1, 2, 3)))
def test_more_tokens_never_need_less(few: int, more: int, zero: int) -> None:
    few, more = sorted((few, more))
    assert (
        forecast(tokens=few, zero=zero).total_bytes <= forecast(tokens=more, zero=zero).total_bytes
    )


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_a_higher_stage_never_needs_more(ranks: int) -> None:
    totals = [forecast(ranks=ranks, zero=zero).total_bytes for zero in (0, 1, 2, 3)]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_more_ranks_never_need_more(zero: int) -> None:
    totals = [forecast(ranks=ranks, zero=zero).total_bytes for ranks in (1, 2, 4, 16)]
    assert totals == sorted(totals, reverse=True)


def test_without_sharding_ranks_change_nothing() -> None:
    assert forecast(ranks=1, zero=0).terms == forecast(ranks=8, zero=0).terms


def test_recomputation_and_narrow_numbers_need_less() -> None:
    assert forecast(recompute="full").total_bytes < forecast().total_bytes
    assert forecast(precision="bf16").total_bytes < forecast().total_bytes


def test_master_weights_and_moments_are_twelve_bytes_a_parameter_whatever_the_precision() -> None:
    for precision in ("fp32", "bf16"):
        terms = forecast(zero=0, precision=precision).terms
        assert terms["master parameters"] + terms["optimizer"] == 12 * MODEL.params


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_experts_on_other_ranks_are_not_held(zero: int) -> None:
    totals = [
        forecast(SPARSE, ranks=8, zero=zero, expert_ranks=ranks).total_bytes for ranks in (1, 2, 8)
    ]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 3


def test_ranks_that_share_experts_hold_their_part_alone() -> None:
    whole, half = (forecast(SPARSE, zero=0, expert_ranks=ranks).terms for ranks in (1, 2))
    away = SPARSE.sparse_layers * 4 * SPARSE.expert_params
    for name, width in (
        ("master parameters", 4),
        ("gathered parameters", 4),
        ("gradients", 4),
        ("optimizer", 8),
    ):
        assert whole[name] - half[name] == width * away
    assert whole["activations"] == half["activations"]
    # With ZeRO each weight and moment is on one rank anyway.
    sharded = [forecast(SPARSE, zero=1, expert_ranks=ranks).terms for ranks in (1, 2)]
    assert sharded[0]["optimizer"] == sharded[1]["optimizer"]


def test_a_layer_with_experts_keeps_rows_and_not_all_experts() -> None:
    more = dataclasses.replace(SPARSE, experts=16)
    kept, of_more = (forecast(model).terms["activations"] for model in (SPARSE, more))
    assert of_more - kept == 4096 * SPARSE.layers * 8 * 4  # a score of each expert
    first = dataclasses.replace(SPARSE, dense_layers=1)
    dense = dataclasses.replace(SPARSE, experts=0)
    of_first, of_dense = (forecast(model).terms["activations"] for model in (first, dense))
    assert kept - of_first == (kept - of_dense) // SPARSE.layers


def test_ranks_that_share_hidden_units_hold_less_and_keep_the_rows_of_all() -> None:
    whole, parts = (forecast(SPARSE, zero=0, expert_parts=n).terms for n in (1, 2))
    away = SPARSE.sparse_layers * 4 * SPARSE.expert_params  # as many as with half of the experts
    assert whole["master parameters"] - parts["master parameters"] == 4 * away
    rows = 4096 * SPARSE.sparse_layers * SPARSE.top_k * SPARSE.hidden
    assert parts["activations"] - whole["activations"] == 4 * rows
