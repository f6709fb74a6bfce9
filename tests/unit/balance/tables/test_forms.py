"""Formats under a budget: as good as brute force, within the budget, above the bound."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.tables.forms import FormOption, choose_forms
from equipoise.base.errors import FitError

# Losses of which every sum is exact.
LOSS = st.integers(0, 1024).map(lambda parts: parts / 1024)
OPTION = st.builds(FormOption, st.just("few bits"), st.integers(0, 60), LOSS)
PARTS = st.lists(
    st.lists(OPTION, min_size=0, max_size=3).map(lambda more: [FormOption("fp32", 64, 0.0), *more]),
    min_size=1,
    max_size=5,
)


@given(PARTS, LOSS)
@settings(max_examples=20, deadline=None)
def test_the_answer_is_that_of_brute_force(parts: list[list[FormOption]], budget: float) -> None:
    answer = choose_forms(parts, budget)
    best = min(
        sum(each.cost_bytes for each in chosen)
        for chosen in itertools.product(*parts)
        if sum(each.loss for each in chosen) <= budget
    )
    assert answer.cost_bytes == best >= answer.bound_bytes
    assert answer.loss <= budget
    assert all(each in part for each, part in zip(answer.chosen, parts, strict=True))


@given(PARTS, LOSS)
@settings(max_examples=15, deadline=None)
def test_a_grid_stays_within_the_budget_and_above_the_bound(
    parts: list[list[FormOption]], budget: float
) -> None:
    exact, coarse = choose_forms(parts, budget), choose_forms(parts, budget, most_states=3)
    assert coarse.loss <= budget
    assert exact.cost_bytes <= coarse.cost_bytes
    assert coarse.bound_bytes <= exact.cost_bytes


def test_many_parts_are_answered_near_the_bound() -> None:
    parts = [
        [
            FormOption("fp32", 64 * size, 0.0),
            FormOption("int8", 24 * size, 0.001 * (1 + size % 7)),
            FormOption("int4", 12 * size, 0.009 * (1 + size % 5)),
        ]
        for size in range(1, 81)
    ]
    answer = choose_forms(parts, 0.4, most_states=512)
    assert answer.loss <= 0.4
    assert answer.gap < 0.01


def test_a_budget_that_nothing_meets_is_refused() -> None:
    with pytest.raises(FitError) as caught:
        choose_forms([[FormOption("int8", 1, 0.2)]], 0.1)
    assert str(caught.value) == (
        "The formats of least loss lose 0.2 together, and the budget is 0.1. Raise the budget, or "
        "offer fp32."
    )
