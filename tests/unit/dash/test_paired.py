"""Sides of one run, step by step."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from equipoise.dash.compare import RunComparison, compare_all, is_paired
from equipoise.dash.paired import pair_steps, student_quantile
from equipoise.dash.summary import labels
from equipoise.dash.verdict import tell, tell_spread
from equipoise.observe.reader import read_run, read_sides
from support.journals import write_run, write_sides

SIDES = RunComparison("in-order", "divided", 1.32, 1.28, 19, True, (), 1.25, 1.39, 1.34)


@given(st.floats(0.5, 0.999), st.integers(1, 400))
def test_the_quantile_is_students(share: float, freedom: int) -> None:
    known = float(stats.t.ppf(share, freedom))
    assert student_quantile(share, freedom) == pytest.approx(known, rel=1e-9, abs=1e-12)


def test_the_interval_covers_the_true_ratio_nine_times_in_ten() -> None:
    draw, covered = np.random.default_rng(0), 0
    true = 1.3 * math.exp(-(0.1**2) / 2)  # the other side's noise has a mean above 1
    for _ in range(1000):
        base = np.exp(draw.normal(0, 0.5, 12))
        other = base / 1.3 * np.exp(draw.normal(0, 0.1, 12))
        ratio = pair_steps(base, other)
        covered += ratio.low <= true <= ratio.high
    assert 850 <= covered <= 930


def test_unknown_steps_are_left_out() -> None:
    ratio = pair_steps(np.array([2.0, np.nan, 4.0, 3.0]), np.array([1.0, 1.0, 0.0, np.nan]))
    assert (ratio.mean, ratio.steps) == (2.0, 1)
    assert math.isnan(ratio.low) and math.isnan(ratio.high)
    assert pair_steps(np.zeros(0), np.zeros(0)).steps == 0


def test_sides_are_found_and_compared_step_by_step(tmp_path: Path) -> None:
    records = read_sides(write_sides(tmp_path / "run"))
    assert [record.start.policy for record in records] == ["in-order", "by-work"]
    (comparison,) = compare_all(records, labels(records))
    one, other = (record.step_s[1:] for record in records)
    expected = one.sum() / other.sum()
    predicted = [record.predicted_step_s[1:].sum() for record in records]
    assert comparison.measured == pytest.approx(expected)
    assert comparison.predicted == pytest.approx(predicted[0] / predicted[1])
    error = (one - expected * other).std(ddof=1) / np.sqrt(11) / one.mean()
    spread = np.exp(stats.t.ppf(0.95, 10) * error)
    assert comparison.low == pytest.approx(expected / spread)
    assert comparison.high == pytest.approx(expected * spread)
    assert comparison.steps == 11
    # Against another run's side there are no pairs.
    other = read_sides(write_sides(tmp_path / "other", session=8))
    assert not is_paired(records[0], other[1])
    (unpaired,) = compare_all([records[0], other[1]], ["a", "b"])
    assert math.isnan(unpaired.low) and tell_spread(unpaired) == ""


def test_the_order_of_sides_is_that_of_the_run(tmp_path: Path) -> None:
    folder = write_sides(tmp_path / "run", policies=("in-order", "by-work", "by-tokens"))
    assert [record.start.policy for record in read_sides(folder)] == [
        "in-order",
        "by-work",
        "by-tokens",
    ]
    assert len(read_sides(folder / "by-work")) == 1


def test_runs_in_one_folder_are_no_sides(tmp_path: Path) -> None:
    for policy in ("in-order", "by-work"):
        write_run(tmp_path / policy, policy=policy, steps=2)
    with pytest.raises(Exception) as caught:
        read_sides(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} has no journal/rank-00000.jsonl: not a run. Runs inside it: "
        f"{tmp_path}/by-work, {tmp_path}/in-order."
    )
    assert read_sides(tmp_path / "by-work")[0].folder == read_run(tmp_path / "by-work").folder


def test_sentences() -> None:
    assert tell(SIDES) == "divided took 24% less time per step than in-order (predicted 22%)."
    assert tell_spread(SIDES) == (
        "1.32 times as fast (90% interval 1.25 to 1.39, by processor time 1.34), over 19 steps "
        "that both computed."
    )
    noise = dataclasses.replace(SIDES, measured=1.01, low=0.98, high=1.04)
    assert tell(noise) == (
        "divided and in-order: no difference in time per step (±3.0%; predicted: 22% shorter)."
    )
    slower = dataclasses.replace(SIDES, measured=0.9, low=0.85, high=0.95, predicted=0.95)
    assert tell(slower) == "divided took 11% longer per step than in-order (predicted 5%)."
    wrong = dataclasses.replace(slower, predicted=1.05)
    assert tell(wrong) == (
        "divided took 11% longer per step than in-order (predicted: 5% shorter)."
    )
    blind = dataclasses.replace(SIDES, predicted=math.nan, busy=math.nan)
    assert tell(blind) == "divided took 24% less time per step than in-order."
    assert "processor" not in tell_spread(blind)


def test_beside_other_programs_processor_time_leads() -> None:
    beside = dataclasses.replace(
        SIDES, measured=1.12, low=1.02, high=1.23, busy_low=1.3, busy_high=1.38, run_delay=0.27
    )
    beside = dataclasses.replace(beside, predicted=1.06, busy_predicted=1.28)
    assert tell(beside) == (
        "Other programs had the cores for 27% of the ranks' time, which processor time leaves out. "
        "divided took 25% less processor time per step than in-order (predicted 22%); by the "
        "clock, 11% less."
    )
    assert tell_spread(beside) == (
        "1.34 times as fast by processor time (90% interval 1.30 to 1.38; by the clock 1.12, 1.02 "
        "to 1.23), over 19 steps that both computed."
    )
    noise = dataclasses.replace(beside, measured=0.8, busy=1.01, busy_low=0.98, busy_high=1.04)
    assert tell(noise) == (
        "Other programs had the cores for 27% of the ranks' time, which processor time leaves out. "
        "divided and in-order: no difference in processor time per step (±3.0%; predicted: 22% "
        "shorter); by the clock, 25% more."
    )
    assert not dataclasses.replace(beside, run_delay=0.04).is_disturbed
    assert not SIDES.is_disturbed  # an older journal does not say
