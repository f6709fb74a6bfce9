"""The measured search: each choice once, the same way on, failures as penalties, few trials."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.plan.measured.next import MeasuredSpace, Trial, best_trial, next_choice
from support.measured_table import draw_table

SEEDS = range(40)


@settings(deadline=None, max_examples=7)
@given(st.integers(0, 2**31), st.floats(0, 1), st.booleans())
def test_each_choice_is_tried_once_whatever_fails(seed: int, failing: float, priced: bool) -> None:
    table = draw_table(seed, failing=failing)
    space = table.space
    if not priced:
        space = MeasuredSpace(space.settings, np.full(len(space.prior_s), np.nan))
    tried: list[Trial] = []
    while (choice := next_choice(space, tried, seed=seed)) is not None:
        tried.append(table.trial(choice))
    assert sorted(trial.choice for trial in tried) == list(range(len(space.settings)))
    best = best_trial(tried)
    assert (best is None) == bool(np.isnan(table.step_s).all())
    assert best is None or best.step_s == np.nanmin(table.step_s)


@settings(deadline=None, max_examples=7)
@given(st.integers(0, 2**31), st.integers(0, 12))
def test_a_stopped_search_goes_on_as_if_it_had_not_been(seed: int, at: int) -> None:
    table = draw_table(seed)
    whole = table.search(seed)
    again = list(whole[:at])
    while len(again) < len(whole):
        choice = next_choice(table.space, again[::-1], seed=seed)
        assert choice is not None
        again.append(table.trial(choice))
    assert again == whole


@settings(deadline=None, max_examples=7)
@given(st.integers(0, 2**31), st.floats(1e-3, 1e3))
def test_the_unit_of_seconds_changes_no_choice(seed: int, unit: float) -> None:
    table = draw_table(seed, failing=0.0)
    scaled = [Trial(each.choice, unit * (each.step_s or 0.0)) for each in table.search(seed, 6)]
    assert next_choice(table.space, scaled) == next_choice(table.space, table.search(seed, 6))


def test_it_loses_little_in_a_quarter_of_the_trials() -> None:
    """Over drawn tables of 48 choices, a fifth of which fail, and prices that are 30% off."""
    tables = [draw_table(seed) for seed in SEEDS]
    budget = tables[0].space.budget
    assert budget == 12
    searched = [table.search_regret(seed) for seed, table in zip(SEEDS, tables, strict=True)]
    random = [
        table.regret(np.random.default_rng(seed).permutation(48)[:budget])
        for seed, table in zip(SEEDS, tables, strict=True)
    ]
    assert np.mean(np.array(searched) <= 0.03) >= 0.9
    assert np.median(searched) < 0.03 < np.median(random)


def test_it_needs_no_true_prices() -> None:
    """Prices dealt out at random, or none: still most tables are won, as random search does not."""
    found = []
    for seed in SEEDS:
        table = draw_table(seed)
        for prices in (
            np.random.default_rng(seed).permutation(table.space.prior_s),
            np.full(48, np.nan),
        ):
            space = MeasuredSpace(table.space.settings, prices)
            found.append(type(table)(space, table.step_s).search_regret(seed))
    assert np.mean(np.array(found) <= 0.03) >= 0.5


def test_what_shares_settings_with_failures_is_put_off() -> None:
    space = MeasuredSpace(np.array([[0, 0], [0, 1], [1, 0], [1, 1]]), np.ones(4))
    trials = [Trial(0, None, "out of memory"), Trial(3, 1.0)]
    assert next_choice(space, [*trials, Trial(1, None, "killed")]) == 2


def test_ties_fall_by_the_seed() -> None:
    space = MeasuredSpace(np.arange(50)[:, None], np.ones(50))
    firsts = {next_choice(space, [], seed=seed) for seed in range(20)}
    assert len(firsts) > 5
    assert next_choice(space, [], seed=3) == next_choice(space, [], seed=3)


def test_messages() -> None:
    with pytest.raises(SpecError) as caught:
        MeasuredSpace(np.zeros((0, 2), np.int64), np.zeros(0))
    assert str(caught.value) == "A measured search over no choices. List at least one."
    with pytest.raises(SpecError) as caught:
        MeasuredSpace(np.zeros((3, 2), np.int64), np.ones(2))
    assert str(caught.value) == (
        "2 prices of 3 choices. Give each choice one, NaN where there is none."
    )
    with pytest.raises(SpecError) as caught:
        MeasuredSpace(np.zeros((2, 2), np.int64), np.array([np.nan, 0.0]))
    assert str(caught.value) == (
        "Choice 1 is priced at 0 s. Give seconds above 0, or NaN without a price."
    )
