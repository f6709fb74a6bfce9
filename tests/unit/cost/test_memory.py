"""The memory forecast: its terms add up, and each moves the way that memory moves."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.cost.memory import MemoryForecast, forecast_memory
from equipoise.spec.model import preset

MODEL = preset("7m")


def forecast(**changes) -> MemoryForecast:
    given_ = {
        "tokens": 4096,
        "ranks": 2,
        "zero": 1,
        "precision": "fp32",
        "recompute": "none",
    } | changes
    return forecast_memory(MODEL, **given_)


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
