"""The order of micro-batches in a pipeline: as replayed, and no longer than the one given."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise import balance
from equipoise.balance.batches.pipeline import order_in_pipeline
from equipoise.schedule.pipeline.bound import bound_pipeline
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.replay import replay_pipeline
from equipoise.schedule.pipeline.strategies import place_stages, write_pipeline
from equipoise.spec.workload import draw_lengths


@given(
    st.lists(st.integers(1, 10**6), min_size=2, max_size=12),
    st.integers(1, 4),
    st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved"]),
)
def test_the_makespan_is_that_of_a_replay(work, ranks, schedule) -> None:
    seconds = np.array(work, dtype=float)
    order, makespan_s = order_in_pipeline(seconds, schedule, ranks)
    assert sorted(order.tolist()) == list(range(len(work)))
    for entering in (order, np.argsort(-seconds, kind="stable")):
        third = 1e9 * seconds[entering] / (3 * ranks)
        prices = make_prices(third, third, third, stages=ranks)
        written = write_pipeline(schedule, prices, ranks=ranks)
        replayed = replay_pipeline(written, prices).makespan_ns / 1e9
        assert makespan_s <= replayed * (1 + 1e-5)
        bound = bound_pipeline(prices, place_stages(schedule, ranks, ranks)) / 1e9
        assert bound <= makespan_s * (1 + 1e-5)


def test_a_pipeline_is_even_over_ranks_and_over_micro_batches() -> None:
    lengths = np.minimum(draw_lengths("python-stdlib", 300, seed=1), 6_000)
    answer = balance.batch(
        lengths, 4, price="7m", max_tokens=80_000, pipeline=4, min_micro_batches=12
    )
    table = answer.seconds[..., 0]
    assert answer.meets == "a pipeline"
    assert answer.skew < 1.01
    assert table.shape == (4, 12)
    assert (table.max(1) / table.mean(1) < 1.05).all()
    assert answer.bound_s <= answer.step_s < 2 * answer.bound_s


def test_a_schedule_may_need_a_multiple_of_its_ranks() -> None:
    answer = balance.batch([10] * 20, 2, price="7m", pipeline=2, multiple_of=4)
    assert [len(rank) for rank in answer.micro_batches] == [4, 4]


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v", "auto"])
def test_schedules_of_other_shapes_run(schedule) -> None:
    answer = balance.batch(
        [10, 20, 30, 40] * 4, price="7m", pipeline=2, schedule=schedule, min_micro_batches=8
    )
    assert answer.step_s >= answer.bound_s
