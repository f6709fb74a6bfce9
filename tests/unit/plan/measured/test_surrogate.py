"""What is believed of choices: measured ones by what was measured, in any unit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.plan.measured.next import believe
from support.measured_table import draw_table


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 2**31), st.integers(1, 20))
def test_measured_choices_are_known(seed: int, count: int) -> None:
    table = draw_table(seed, failing=0.0)
    prior = table.space.log_prior
    rows = np.random.default_rng(seed).permutation(len(prior))[:count]
    log_s = np.log(table.step_s[rows])
    found = believe(table.space.settings, prior, rows, log_s, np.full(count, 1e-3))
    assert found.weight.sum() == pytest.approx(1.0)
    assert np.abs(found.mean[:, rows] - log_s).max() < 0.01
    assert found.deviation[:, rows].max() < 0.01
    others = np.setdiff1d(np.arange(len(prior)), rows)
    assert found.deviation[:, others].min() > found.deviation[:, rows].max()


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 2**31), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_the_unit_of_seconds_and_of_prices_changes_nothing(
    seed: int, unit: float, price: float
) -> None:
    table = draw_table(seed, failing=0.0)
    prior, rows = table.space.log_prior, np.array([3, 17, 30])
    log_s, noise = np.log(table.step_s[rows]), np.full(3, 0.02)
    one = believe(table.space.settings, prior, rows, log_s, noise)
    two = believe(table.space.settings, prior + np.log(price), rows, log_s + np.log(unit), noise)
    assert two.mean == pytest.approx(one.mean + np.log(unit), abs=1e-6)
    assert two.deviation == pytest.approx(one.deviation, abs=1e-6)


def test_prices_of_the_wrong_slope_are_seen_through() -> None:
    table = draw_table(5, off=0.0, failing=0.0)
    rows = np.arange(0, len(table.step_s), 3)
    log_s = np.log(table.step_s[rows])
    args = (rows, log_s, np.full(len(rows), 0.02))
    found = believe(table.space.settings, -table.space.log_prior, *args)
    errors = found.weight @ found.mean - np.log(table.step_s)
    assert np.abs(errors).mean() < 0.15
