"""The learning rate of every step."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.optim.rate import RATES, learning_rate
from equipoise.spec.run.spec import RateSchedule, TrainSpec


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    train = TrainSpec(lr=1e-3, steps=100, warmup_steps=4)
    assert [learning_rate(train, step) for step in (1, 2, 3, 4)] == [
        pytest.approx(1e-3 * quarter / 4) for quarter in (1, 2, 3, 4)
    ]


def test_without_warm_up_the_first_step_is_near_the_peak() -> None:
    train = TrainSpec(lr=1e-3, steps=1000, warmup_steps=0)
    assert learning_rate(train, 1) == pytest.approx(1e-3, rel=1e-4)


def test_cosine_ends_at_its_ratio_and_stays_there() -> None:
    train = TrainSpec(lr=2.0, steps=10, warmup_steps=2, final_lr_ratio=0.25)
    assert learning_rate(train, 6) == pytest.approx(2.0 * (0.25 + 0.75 / 2))
    assert learning_rate(train, 10) == pytest.approx(0.5)
    assert learning_rate(train, 99) == pytest.approx(0.5)


def test_constant_stays() -> None:
    train = TrainSpec(lr=2.0, steps=10, warmup_steps=1, schedule="constant")
    assert {learning_rate(train, step) for step in range(1, 20)} == {2.0}


def test_linear_ends_at_its_ratio_and_stays_there() -> None:
    train = TrainSpec(lr=2.0, steps=10, warmup_steps=2, final_lr_ratio=0.25, schedule="linear")
    assert learning_rate(train, 6) == pytest.approx(2.0 * (0.25 + 0.75 / 2))
    assert learning_rate(train, 10) == learning_rate(train, 99) == 0.5


@pytest.mark.parametrize(("decay", "falls"), [(None, 10), (40, 40)])
def test_wsd_holds_the_peak_and_then_falls(decay: int | None, falls: int) -> None:
    train = TrainSpec(
        lr=1.0, steps=100, warmup_steps=5, final_lr_ratio=0.0, schedule="wsd", decay_steps=decay
    )
    assert train.falling_steps == falls
    assert {learning_rate(train, step) for step in range(5, 101 - falls)} == {1.0}
    assert learning_rate(train, 100 - falls // 2) == pytest.approx(0.5)
    assert learning_rate(train, 100) == learning_rate(train, 101) == 0.0


def test_inverse_sqrt_halves_at_four_times_the_warm_up() -> None:
    train = TrainSpec(lr=1.0, steps=100, warmup_steps=10, schedule="inverse-sqrt")
    assert learning_rate(train, 40) == pytest.approx(0.5)
    bare = TrainSpec(lr=1.0, steps=100, warmup_steps=0, schedule="inverse-sqrt")
    assert learning_rate(bare, 30_000) == pytest.approx(0.5)


def test_every_name_has_a_row() -> None:
    assert tuple(RATES) == get_args(RateSchedule)


@given(
    st.integers(1, 50),
    st.integers(0, 60),
    st.integers(1, 60),
    st.sampled_from(sorted(RATES)),
    st.floats(0, 1),
)
def test_never_over_the_peak_never_negative(steps, warmup, step, schedule, ratio) -> None:
    train = TrainSpec(
        lr=1.0, steps=steps, warmup_steps=warmup, schedule=schedule, final_lr_ratio=ratio
    )
    rate = learning_rate(train, step)
    assert math.isfinite(rate)
    assert 0 <= rate <= 1 + 1e-12
