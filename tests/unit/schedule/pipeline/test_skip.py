"""Paths that leave stages out: even, free of conflicts, as much faster as is skipped."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError
from equipoise.schedule.pipeline.check import check_pipeline
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.replay import count_in_flight, replay_pipeline
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.spec.catalog import LOSSY


@given(
    st.sampled_from(LOSSY),
    st.integers(3, 9),
    st.integers(1, 12),
    st.integers(0, 7),
    st.data(),
)
def test_visits_are_even_and_stages_busy_with_one_thing(
    strategy: str, stages: int, micro_batches: int, left_out: int, data
) -> None:
    between = stages - 2
    left_out = min(left_out, between - 1)
    column = data.draw(st.lists(st.integers(1, 9), min_size=stages, max_size=stages))
    row = data.draw(st.lists(st.integers(1, 9), min_size=micro_batches, max_size=micro_batches))
    work = np.outer(column, row)
    prices = make_prices(work, work, work, hop_ns=1)
    schedule = write_pipeline(strategy, prices, ranks=stages, skip=left_out / between)
    check_pipeline(schedule, allow_lossy=True)
    assert schedule.is_lossy == bool(left_out) or strategy == "skip-reordered"
    for path in schedule.paths.tolist():
        assert len(set(path)) == len(path) == stages - left_out
        assert (path[0], path[-1]) == (0, stages - 1)
        sorted_path = sorted(path)
        assert all(abs(sorted_path.index(s) - at) <= 1 for at, s in enumerate(path))
    visits = np.bincount(schedule.paths.ravel(), minlength=stages)
    assert visits[0] == visits[-1] == micro_batches
    assert visits[1:-1].max() - visits[1:-1].min() <= 1
    timeline = replay_pipeline(schedule, prices)
    for rank in range(stages):
        mine = timeline.rank == rank
        begins, ends = timeline.begin_ns[mine], timeline.end_ns[mine]
        assert (begins[1:] >= ends[:-1]).all()


@pytest.mark.parametrize("strategy", LOSSY)
@pytest.mark.parametrize("skip", [0.125, 0.25, 0.5])
def test_a_step_gets_shorter_by_what_is_skipped(strategy: str, skip: float) -> None:
    """Embedding and head on light stages of their own, eight equal ones between."""
    column = np.array([[1], *[[10]] * 8, [1]])
    prices = make_prices(column, column, column, stages=10, micro_batches=32)
    part = write_pipeline(strategy, prices, ranks=10, skip=skip, most_held=10)
    short = replay_pipeline(part, prices).makespan_ns
    for name, slack in (("1f1b", 1.0), ("zb-h1", 1.01)):
        full = write_pipeline(name, prices, ranks=10)
        assert count_in_flight(full).peak.max() == 10
        assert short <= slack * (1 - skip) * replay_pipeline(full, prices).makespan_ns


def test_nothing_is_skipped_for_nothing() -> None:
    prices = make_prices(1, 1, 1, stages=2, micro_batches=3)
    schedule = write_pipeline("skip-partial", prices, ranks=2)
    assert not schedule.is_lossy
    check_pipeline(schedule)


def test_shares_that_cannot_be_skipped() -> None:
    prices = make_prices(1, 1, 1, stages=4, micro_batches=3)
    for skip in (-0.1, 1.0, float("nan")):
        with pytest.raises(LayoutError) as caught:
            write_pipeline("skip-partial", prices, ranks=4, skip=skip)
        assert str(caught.value) == (
            f"skip-partial has skip = {skip:g}. Give a share of 0 or more and below 1."
        )
    with pytest.raises(LayoutError) as caught:
        write_pipeline("skip-partial", prices, ranks=4, skip=0.2)
    assert str(caught.value) == (
        "skip = 0.2 of the 2 stages between the first and the last skips none. Give skip-partial "
        "more stages or a larger share."
    )
