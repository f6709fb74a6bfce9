"""The learning rate of every step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.optim.rate import learning_rate
from equipoise.spec.run.spec import TrainSpec


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


@given(
    st.integers(1, 50),
    st.integers(0, 60),
    st.integers(1, 60),
    st.sampled_from(("cosine", "constant")),
    st.floats(0, 1),
)
def test_never_over_the_peak_never_negative(steps, warmup, step, schedule, ratio) -> None:
    train = TrainSpec(
        lr=1.0, steps=steps, warmup_steps=warmup, schedule=schedule, final_lr_ratio=ratio
    )
    rate = learning_rate(train, step)
    assert math.isfinite(rate)
    assert 0 <= rate <= 1 + 1e-12
