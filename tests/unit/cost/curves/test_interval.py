"""Intervals of medians: they hold the median, and cover the true one as often as they say."""

import statistics

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from equipoise.cost.curves.interval import median_interval


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=60))
def test_the_interval_holds_the_median_and_is_of_samples(samples: list[float]) -> None:
    found = median_interval(samples)
    assert found.low <= found.mid <= found.high
    assert found.mid == statistics.median(samples)
    assert {found.low, found.high} <= set(samples)


def test_it_covers_the_true_median_19_times_of_20() -> None:
    generator = np.random.default_rng(0)
    for count in (6, 9, 20, 40):
        drawn = generator.lognormal(0.0, 1.0, (3000, count))
        found = [median_interval(row.tolist()) for row in drawn]
        covered = np.mean([each.low <= 1.0 <= each.high for each in found])
        assert covered >= 0.94
        if count >= 20:  # and it is no wider than it must be
            assert covered <= 0.985


def test_of_few_samples_it_is_all_of_them() -> None:
    assert (median_interval([3.0, 1.0, 2.0]).low, median_interval([3.0, 1.0]).high) == (1.0, 3.0)
