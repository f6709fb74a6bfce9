"""Rates of a recommender's parts: found again from their seconds, never negative."""

import dataclasses

import numpy as np
import pytest

from equipoise.base.errors import SpecError
from equipoise.cost.recommend import PARTS, RankCounts, StepRates, TableRates, fit_rates

RATES = {
    "lookup": (1e-3, 2e-4, 1e-10),
    "exchange": (5e-4, 1e-9),
    "dense": (2e-3, 1e-9),
    "reduce": (1e-3, 2e-9),
    "rest": (4e-4, 1e-7),
}


def some_counts() -> list[RankCounts]:
    source = np.random.default_rng(0)
    return [
        RankCounts(
            shards=int(source.integers(1, 9)),
            table_bytes=float(source.uniform(1e5, 1e8)),
            exchanges=int(source.integers(5, 9)),
            sent_bytes=float(source.uniform(1e4, 1e7)),
            flop=float(source.uniform(1e6, 1e9)),
            dense_bytes=int(source.integers(1e4, 1e6)),
            dense_exchanges=1,
            samples=float(source.integers(8, 4096)),
        )
        for _ in range(12)
    ]


def test_rates_are_found_again() -> None:
    truth = StepRates(RATES, "a machine", "2026-01-01", 0.0, 0.0)
    counts = some_counts()
    fitted = fit_rates(counts, [truth.price(each) for each in counts])
    for part in PARTS:
        assert fitted[part] == pytest.approx(RATES[part], rel=1e-6)
    assert StepRates.from_row(truth.as_row()) == truth


def test_no_rate_is_negative_and_noise_costs_little() -> None:
    truth, source = StepRates(RATES, "", "", 0.0, 0.0), np.random.default_rng(1)
    counts = some_counts()
    noisy = [
        {part: seconds * source.uniform(0.8, 1.2) for part, seconds in truth.price(each).items()}
        for each in counts
    ]
    fitted = StepRates(fit_rates(counts, noisy), "", "", 0.0, 0.0)
    assert all(rate >= 0 for rates in fitted.rates.values() for rate in rates)
    for each in counts:
        ours, theirs = (sum(one.price(each).values()) for one in (fitted, truth))
        assert ours == pytest.approx(theirs, rel=0.2)


def test_what_did_not_happen_costs_nothing() -> None:
    alone = RankCounts(2, 1e6, 0, 0.0, 1e6, 0, 0, 8.0)
    seconds = {"lookup": 1e-3, "exchange": 0.0, "dense": 1e-3, "reduce": 0.0, "rest": 1e-3}
    fitted = fit_rates([alone], [seconds])
    assert fitted["exchange"] == fitted["reduce"] == (0.0, 0.0)


def test_rates_that_tell_nothing_place_no_table() -> None:
    known = StepRates(RATES, "a machine", "2026-01-01", 0.1, 0.0)
    rates = TableRates.fitted(known)
    assert rates == TableRates(1e10, pytest.approx(1e9), 2e-4, "2026-01-01")
    assert rates.words == "rates of 2026-01-01"
    far = dataclasses.replace(known, error=0.3)
    no_pass = dataclasses.replace(known, rates=RATES | {"lookup": (1e-3, 2e-4, 0.0)})
    no_sent = dataclasses.replace(known, rates=RATES | {"exchange": (5e-4, 0.0)})
    for each in (None, far, no_pass, no_sent):
        assert TableRates.fitted(each) == TableRates()
    assert TableRates().words == "assumed rates"


def test_damaged_rates_are_refused() -> None:
    with pytest.raises(SpecError) as error:
        StepRates.from_row({"machine": "a"})
    assert str(error.value) == (
        "The rates of recommenders are damaged ('rates'). Measure them again: equipoise calibrate "
        "run.toml."
    )
