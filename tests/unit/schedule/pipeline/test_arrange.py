"""Light micro-batches outside: a permutation that keeps units together, and what it brings."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from equipoise.schedule.pipeline.arrange import light_outside
from equipoise.schedule.pipeline.check import check_pipeline
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.replay import replay_pipeline
from equipoise.schedule.pipeline.schedule import single_units
from equipoise.schedule.pipeline.strategies import write_pipeline
from support.pipelines import steps, units_of


@given(steps(), st.data())
def test_every_micro_batch_once_and_slices_in_order(step, data) -> None:
    ranks, prices = step
    units = data.draw(units_of(prices.micro_batches))
    entering = light_outside(prices, np.array(units)).tolist()
    assert sorted(entering) == list(range(prices.micro_batches))
    for first, stop in units:
        at = entering.index(first)
        assert entering[at : at + stop - first] == list(range(first, stop))
    schedule = write_pipeline("gpipe", prices, ranks=ranks, units=units, arranged=True)
    check_pipeline(schedule)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_heavier_up_to_the_middle_and_lighter_after_it(work: list[int]) -> None:
    prices = make_prices(work, work, work, stages=3)
    entering = np.array(work)[light_outside(prices, single_units(len(work)))]
    if len(set(work)) == 1:
        assert entering.tolist() == work
        return
    top = int(entering.argmax())
    assert (np.diff(entering[: top + 1]) >= 0).all()
    assert (np.diff(entering[top:]) <= 0).all()


def test_it_shortens_steps_of_uneven_micro_batches() -> None:
    rng = np.random.default_rng(1)
    for strategy, chunks in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)):
        times = np.zeros(2)
        for _ in range(10):
            work = 1e6 * rng.lognormal(0, 0.4, 32)
            prices = make_prices(work, work, work, stages=8 * chunks)
            for at, arranged in enumerate((False, True)):
                schedule = write_pipeline(strategy, prices, ranks=8, arranged=arranged)
                times[at] += replay_pipeline(schedule, prices).makespan_ns
        assert times[1] < 0.95 * times[0]
