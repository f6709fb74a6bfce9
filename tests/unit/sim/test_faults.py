"""Failures, jitter and what is held over time, against closed forms and counts."""

import dataclasses
import math

import numpy as np
import pytest

from equipoise.base.errors import SpecError
from equipoise.schedule.pipeline.replay import count_in_flight
from equipoise.sim import faults
from equipoise.sim.faults import (
    FaultOptions,
    best_interval,
    daly_interval,
    expected_goodput,
    price_days,
    read_faults,
    run_with_faults,
)
from equipoise.sim.jitter import run_with_jitter
from equipoise.sim.moments import bytes_over_time, held_over_time
from equipoise.sim.step import StepRun, run_step
from equipoise.spec.layout import Layout
from support.machines import MODEL, h100, options

FAULTS = FaultOptions(device_mtbf_s=1e7, checkpoint_s=30.0, restart_s=400.0, checkpoint_steps=50)


def step(schedule: str = "1f1b", virtual: int = 1) -> StepRun:
    asked = options(step_sequences=32, schedule=schedule, virtual=virtual)
    return run_step(MODEL, h100(8), Layout(pp=4, dp=2), asked)


def test_many_failures_are_the_closed_form() -> None:
    mean_s = 1e7 / 2000
    found = run_with_faults(10.0, 2000, FAULTS, steps=200_000, seed=3)
    restart = mean_s * (math.exp(400 / mean_s) - 1)
    segment = (mean_s + restart) * (math.exp((50 * 10 + 30) / mean_s) - 1)
    assert found.wall_s == pytest.approx(200_000 / 50 * segment, rel=0.02)
    assert found.goodput == pytest.approx(50 * 10 / segment, rel=0.02)
    spent = 200_000 * 10 + found.lost_s + found.saving_s + found.restarting_s
    assert found.wall_s == pytest.approx(spent)


def test_nothing_fails() -> None:
    never = FaultOptions(1e30, 0.0, 0.0, checkpoint_steps=10)
    found = run_with_faults(2.0, 8, never, steps=100)
    assert (found.goodput, found.wall_s, found.failures) == (1.0, 200.0, 0)


def test_the_same_seed_fails_alike_and_another_otherwise() -> None:
    first, again, other = (
        run_with_faults(10.0, 2000, FAULTS, steps=5000, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_young_is_near_the_best() -> None:
    found = {
        every: run_with_faults(
            10.0, 2000, FaultOptions(1e7, 30.0, 400.0, checkpoint_steps=every), steps=100_000
        ).goodput
        for every in (5, 20, 55, 150, 400)
    }
    assert best_interval(10.0, 2000, FAULTS) == 55
    assert max(found, key=lambda every: found[every]) == 55
    plain = run_with_faults(10.0, 2000, FaultOptions(1e7, 30.0, 400.0), steps=100)
    assert plain.checkpoint_steps == 55


def test_detection_is_a_part_of_the_time_away() -> None:
    """A failure that is detected later costs as much as one whose restart takes longer."""
    late = dataclasses.replace(FAULTS, detect_s=100.0, restart_s=300.0)
    found, plain = (run_with_faults(10.0, 2000, each, steps=9000) for each in (late, FAULTS))
    assert found.wall_s == plain.wall_s
    assert found.detecting_s == pytest.approx(found.restarting_s / 3)
    assert found.detecting_s + found.restarting_s == pytest.approx(plain.restarting_s)
    expected = [expected_goodput(10.0, 2000, each) for each in (late, FAULTS)]
    assert expected == [expected[0]] * 2
    long = run_with_faults(10.0, 2000, late, steps=200_000, seed=3)
    assert long.goodput == pytest.approx(expected[0], rel=0.02)


def test_without_a_spare_the_run_waits_for_each_repair() -> None:
    """Nothing fails while it waits, so that each failure but the last costs its repair."""
    none = dataclasses.replace(FAULTS, spares=0, repair_s=7200.0)
    found = run_with_faults(10.0, 2000, none, steps=9000)
    assert found.waiting_s == pytest.approx(7200.0 * found.failures)
    few, many = (
        run_with_faults(10.0, 2000, dataclasses.replace(none, spares=spares), steps=9000)
        for spares in (1, 1000)
    )
    assert 0 < few.waiting_s < found.waiting_s
    assert many == run_with_faults(10.0, 2000, FAULTS, steps=9000)
    for each in (found, few):
        parts = each.lost_s, each.saving_s, each.restarting_s, each.detecting_s, each.waiting_s
        assert each.wall_s == pytest.approx(9000 * 10 + sum(parts))


def test_a_month_is_the_mean_of_many_and_near_the_closed_form() -> None:
    month = price_days(10.0, 2000, FAULTS, days=30)
    assert month.mean.goodput == pytest.approx(month.expected, abs=0.005)
    assert month.goodput_low < month.mean.goodput < month.goodput_high
    assert month.mean.wall_s == pytest.approx(30 * 86_400, rel=1e-3)
    assert month.mean.steps * 10.0 / month.mean.wall_s == pytest.approx(month.mean.goodput)
    assert (month.young_steps, month.daly_steps) == (55, 53)
    assert daly_interval(10.0, 2000, dataclasses.replace(FAULTS, checkpoint_s=1e5)) == 500


FORM = (
    "Write mtbf=50000h, and after commas any of checkpoint=30s, detect=10s, restart=600s, "
    "steps=200 (between checkpoints), spares=4, repair=24h, days=30."
)


def test_words_of_faults() -> None:
    options, days = read_faults(
        "mtbf=2d, checkpoint=1.5s,detect=2m,restart=1h,steps=9,spares=0,days=7"
    )
    assert days == 7
    assert options == FaultOptions(172_800.0, 1.5, 3600.0, 9, detect_s=120.0, spares=0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("mtbf=50000", f'--faults: "mtbf=50000" cannot be read. {FORM}'),
        ("mtbf=1h,spare=2", f'--faults: "spare=2" cannot be read. {FORM}'),
        ("mtbf=1h,mtbf=2h", f"--faults: mtbf is given twice. {FORM}"),
        ("checkpoint=1s", f"--faults: mtbf is missing, and without it nothing fails. {FORM}"),
        ("mtbf=1h,spares=-1", "There are -1 spares. Give 0 or more."),
    ],
)
def test_words_that_are_refused(words: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_faults(words)
    assert str(caught.value) == said


@pytest.mark.parametrize("days", [0.0, -1.0, 1e6, math.nan])
def test_no_time_to_price(days: float) -> None:
    with pytest.raises(SpecError) as caught:
        price_days(10.0, 2000, FAULTS, days=days)
    assert str(caught.value) == (
        f"{days:g} days cannot be priced. Give more than 0 and less than 36,500."
    )


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (
            FaultOptions(0.0, 1.0, 1.0),
            "The mean time between failures is 0 s, a checkpoint takes 1 s and a restart 1 s. "
            "Give the first above 0, the others 0 or more, and all of them at most 1e+100 s.",
        ),
        (
            FaultOptions(math.inf, 1.0, 1.0),
            "The mean time between failures is inf s, a checkpoint takes 1 s and a restart 1 s. "
            "Give the first above 0, the others 0 or more, and all of them at most 1e+100 s.",
        ),
        (
            FaultOptions(1.0, math.nan, 1.0),
            "The mean time between failures is 1 s, a checkpoint takes nan s and a restart 1 s. "
            "Give the first above 0, the others 0 or more, and all of them at most 1e+100 s.",
        ),
        (
            FaultOptions(225.0, 30.0, 600.0, checkpoint_steps=1),
            "1,000 devices fail every 225.0 ms, and 1 steps with their checkpoint take 2 min 10 s, "
            "a restart 10 min 0 s: the run would not end. Save more often, or faster.",
        ),
        (
            FaultOptions(1e5, 30.0, 1e4),
            "1,000 devices fail every 1 min 40 s, and 1 steps with their checkpoint take 2 min 10 "
            "s, a restart 2 h 46 min: the run would not end. Start again sooner.",
        ),
        (
            FaultOptions(1e300, 1e10, 600.0),
            "The mean time between failures is 1e+300 s, a checkpoint takes 1e+10 s and a restart "
            "600 s. Give the first above 0, the others 0 or more, and all of them at most 1e+100 "
            "s.",
        ),
        (
            FaultOptions(1.0, 1.0, 1.0, checkpoint_steps=0),
            "0 steps between checkpoints. Give 1 or more.",
        ),
        (
            FaultOptions(1e6, 60.0, 1.0, checkpoint_steps=1000),
            "1,000 devices fail every 16 min 40 s, and 1000 steps with their checkpoint take 27 h "
            "47 min, a restart 1.00 s: the run would not end. Save more often, or faster.",
        ),
    ],
)
def test_what_is_no_time(faults: FaultOptions, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        run_with_faults(100.0, 1000, faults, steps=10)
    assert str(caught.value) == message


def test_jitter_costs_more_with_more_of_it_and_with_more_ranks() -> None:
    run = step().slowest
    assert run_with_jitter(run, 64, 0.0).mean == 1.0
    shares = [run_with_jitter(run, 8, share).mean for share in (0.02, 0.1, 0.3)]
    assert 1.0 < shares[0] < shares[1] < shares[2]
    ranks = [run_with_jitter(run, count, 0.1).mean for count in (1, 8, 64, 1024)]
    assert ranks[0] < ranks[1] < ranks[2] < ranks[3]
    # The mean of the largest of 64 and of 1,024 normal draws: 2.4 and 3.2 deviations.
    deviation = (ranks[2] - ranks[0]) / 2.4
    assert (ranks[3] - ranks[0]) / deviation == pytest.approx(3.2, rel=0.1)
    assert run_with_jitter(run, 8, 0.1) == run_with_jitter(run, 8, 0.1)
    assert run_with_jitter(run, 8, 0.1).p95 >= shares[1]
    with pytest.raises(SpecError) as caught:
        run_with_jitter(run, 8, 2.0)
    assert str(caught.value) == "jitter is 2; it must be between 0 and 1."


SCHEDULES = [("1f1b", 1), ("zb-h2", 1), ("interleaved", 2)]


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_memory_over_time_peaks_at_the_forecast(schedule: str, virtual: int) -> None:
    found = step(schedule, virtual)
    for rank, curve in enumerate(bytes_over_time(found.slowest, found.memory)):
        assert curve.held.max() == pytest.approx(found.price.memory_bytes[rank])
        assert curve.held[-1] == curve.held.min() > 0
        # What stays: weights, gradients, optimizer, logits and working space.
        stays = found.memory.stage_bytes[rank] - found.memory.flight_bytes[rank]
        assert curve.held[-1] == pytest.approx(stays)


def test_memory_over_time_of_a_rank_that_holds_less_than_the_fullest() -> None:
    short, long = [[1024]] * 16, [[4096]] * 16
    asked = options(step_sequences=32)
    layout = Layout(pp=4, dp=2)
    found = run_step(MODEL, h100(8), layout, asked, documents=[long, short])
    other = run_step(MODEL, h100(8), layout, asked, documents=[short, short])
    mixed = dataclasses.replace(found, slowest=other.slowest)
    curve = bytes_over_time(mixed.slowest, mixed.memory)[0]
    stays = float(found.memory.stage_bytes[0] - found.memory.flight_bytes[0])
    assert curve.held.max() == pytest.approx(stays + found.memory.flight_bytes[0] / 4)


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_what_is_held_over_time_peaks_as_counted(schedule: str, virtual: int) -> None:
    found = step(schedule, virtual)
    layers = np.array(found.layers)
    activation = np.repeat(layers[:, None], found.slowest.schedule.micro_batches, axis=1)
    peak = count_in_flight(found.slowest.schedule, activation).peak
    for rank, curve in enumerate(held_over_time(found.slowest, activation)):
        assert curve.held[-1] == 0
        assert curve.held.min() >= 0
        assert curve.held.max() == peak[rank]
        assert (np.diff(curve.at_ns) >= 0).all()


def test_steps_that_cost_nothing_to_save_are_priced_at_once() -> None:
    """Young saves after each of them, and a month has 2.6e12 of a microsecond."""
    month = price_days(1e-6, 1000, FaultOptions(1.8e8, 0.0, 600.0))
    assert (month.young_steps, month.mean.checkpoint_steps) == (1, 1)
    assert month.mean.goodput == pytest.approx(month.expected, abs=1e-3)
    assert month.mean.wall_s == pytest.approx(30 * 86_400, rel=1e-3)


def test_a_month_ends_though_no_spare_comes() -> None:
    """A repair that takes years does not count beyond the month; shares of time add up to 1."""
    month = price_days(1.0, 8, FaultOptions(1.8e7, 30.0, 600.0, spares=0, repair_s=1e8), days=30)
    run, wall_s = month.mean, 30 * 86_400
    assert run.wall_s == pytest.approx(wall_s, rel=1e-2)
    away_s = run.lost_s + run.saving_s + run.restarting_s + run.detecting_s
    assert run.waiting_s > wall_s / 10
    assert run.goodput * run.wall_s + away_s + run.waiting_s == pytest.approx(wall_s, rel=1e-2)


def test_times_of_many_failures_are_drawn_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_MOST_FAILURES", 1e4)
    day = price_days(1.0, 10, FaultOptions(100.0, 0.0, 1.0), days=1)
    assert day.goodput_low == day.goodput_high
    assert day.mean.goodput == pytest.approx(day.expected, rel=0.03)


def test_failures_of_every_moment_are_drawn_for_a_part_of_the_days(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All 86 million would take a minute."""
    monkeypatch.setattr(faults, "_MOST_FAILURES", 1e4)
    options = FaultOptions(0.01, 0.0, 1e-4)
    day = price_days(1e-4, 10, options, days=1)
    spared = price_days(1e-4, 10, dataclasses.replace(options, spares=10**9), days=1)
    assert spared.mean == day.mean  # nobody ever waits for one
    assert day.mean.goodput == pytest.approx(day.expected, rel=0.03)
    assert day.mean.failures == pytest.approx(86_400 / 1e-3, rel=0.03)
    assert day.mean.wall_s == pytest.approx(86_400, rel=0.03)
    assert day.mean.steps == pytest.approx(86_400 * day.mean.goodput / 1e-4, rel=0.03)
    # With spares each day counts, for these run out.
    few = price_days(1.0, 10, FaultOptions(1e4, 0.0, 1.0, spares=2, repair_s=1e4), days=1)
    assert few.mean.wall_s == pytest.approx(86_400, rel=0.03) and few.mean.waiting_s > 0
