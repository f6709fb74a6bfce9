"""Intervals of a step's time, from the curves that priced it."""

import math

import pytest

from equipoise.cost.step.request import TERMS
from equipoise.cost.step.spread import (
    CURVES,
    SPREADS,
    WIDTH,
    curve_seconds,
    step_interval,
    step_spread,
)

ENDS = {"data traffic", "optimizer"}


def test_every_term_of_a_pass_has_a_curve_and_no_other() -> None:
    named = [name for names in CURVES.values() for name in names]
    assert len(named) == len(set(named))
    assert set(named) == set(TERMS) | ENDS
    assert CURVES.keys() == SPREADS.keys()


def test_waiting_is_shared_out_and_seconds_add_up() -> None:
    terms = {"products": 2.0, "attention": 1.0, "data traffic": 1.0, "pipeline bubble": 4.0}
    by_curve = curve_seconds(terms)
    assert sum(by_curve.values()) == pytest.approx(8.0)
    assert by_curve["matrix products"] == pytest.approx(2 * by_curve["attention"])


def test_a_step_of_one_curve_has_its_spread() -> None:
    for curve, names in CURVES.items():
        found = step_interval({names[0]: 3.0})
        assert found.high_s == pytest.approx(3.0 * math.exp(WIDTH * SPREADS[curve]))
        assert found.low_s * found.high_s == pytest.approx(9.0)
        assert [each.curve for each in found.spreads] == [curve]
        assert found.spreads[0].spread_s == pytest.approx(3.0 * SPREADS[curve])


def test_curves_are_independent_of_each_other() -> None:
    both = step_spread({"matrix products": 0.5, "attention": 0.5})
    alone = [step_spread({curve: 0.5}) for curve in ("matrix products", "attention")]
    assert max(alone) < both < sum(alone)
    assert both == pytest.approx(math.hypot(*alone))


def test_the_largest_uncertainty_comes_first_with_what_it_priced() -> None:
    found = step_interval({"products": 10.0, "tensor traffic": 1.0, "context traffic": 30.0})
    assert [each.curve for each in found.spreads] == ["messages", "matrix products"]
    assert found.spreads[0].terms == ("context traffic", "tensor traffic")
