"""Replicas of a pipeline meet in one order, or are told where they would not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import CheckError
from equipoise.schedule.pipeline.instruction import Op
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.replicas import (
    check_meetings,
    count_exchanges,
    count_splits,
    list_meetings,
)
from equipoise.schedule.pipeline.strategies import write_pipeline
from support.pipelines import WHOLE, steps, write_if_legal


@given(steps(), st.sampled_from(WHOLE), st.data())
def test_meetings_are_the_instructions_that_have_collectives(step, name, data) -> None:
    ranks, prices = step
    schedule = write_if_legal(name, prices, ranks=ranks)
    if schedule is None:
        return
    row = st.lists(st.integers(0, 2), min_size=prices.stages, max_size=prices.stages)
    counts = np.array(data.draw(st.lists(row, min_size=4, max_size=4)))
    meetings = list_meetings(schedule, counts)
    total = 0
    for rank, table in enumerate(schedule.orders):
        wanted = [
            [*each, counts[each[0], each[1]]] for each in table.tolist() if counts[each[0], each[1]]
        ]
        assert meetings[meetings[:, 0] == rank, 1:].tolist() == wanted
        total += len(wanted)
    assert total == len(meetings)
    check_meetings([meetings, meetings.copy()])


def test_weight_gradients_may_stand_anywhere() -> None:
    """They contain no collective, so 1F1B and ZB-H1 meet alike where they only split backwards."""
    counts = count_exchanges([1, 1])
    split = write_pipeline("zb-h1", make_prices(1, 1, 1, stages=2, micro_batches=3), ranks=2)
    moved = [table.copy() for table in split.orders]
    last = moved[0][:, 0] == Op.BACKWARD_WEIGHT
    moved[0] = np.concatenate((moved[0][~last], moved[0][last]))
    other = type(split)(split.strategy, split.rank_of, tuple(moved), split.paths, split.units)
    assert other.digest != split.digest
    check_meetings([list_meetings(each, counts) for each in (split, other)])


def test_who_meets_otherwise_is_told_where() -> None:
    prices = make_prices(1, 1, 1, stages=2, micro_batches=3)
    counts = count_exchanges([0, 2])
    one, other = (
        list_meetings(write_pipeline(name, prices, ranks=2), counts) for name in ("1f1b", "gpipe")
    )
    with pytest.raises(CheckError) as caught:
        check_meetings([one, one, other])
    assert str(caught.value) == (
        "Rank 1 of the pipeline meets its replicas out of order: meeting 1 is the backward of "
        "micro-batch 0 on stage 1 (4 collectives) on replica 0 and the forward of micro-batch 1 on "
        "stage 1 (6 collectives) on replica 2. Give all replicas equally many micro-batches and "
        "one schedule, written from the highest price of each micro-batch."
    )


def test_who_has_fewer_micro_batches_is_told() -> None:
    counts = count_splits(1, zero=2)
    few, many = (
        list_meetings(
            write_pipeline("1f1b", make_prices(1, 1, 1, stages=1, micro_batches=n), ranks=1), counts
        )
        for n in (1, 2)
    )
    with pytest.raises(CheckError) as caught:
        check_meetings([many, few])
    assert str(caught.value) == (
        "Rank 0 of the pipeline meets its replicas out of order: meeting 1 is the backward of "
        "micro-batch 1 on stage 0 (1 collective) on replica 0 and none on replica 1. Give all "
        "replicas equally many micro-batches and one schedule, written from the highest price of "
        "each micro-batch."
    )


def test_nobody_meets_where_nothing_is_shared() -> None:
    assert not count_splits(3, zero=1).any()
    assert not count_exchanges([0, 0]).any()
    assert count_splits(2, zero=3).tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]
    prices = make_prices(1, 1, 1, stages=2, micro_batches=3)
    schedules = [write_pipeline(name, prices, ranks=2) for name in ("1f1b", "gpipe")]
    check_meetings([list_meetings(each, np.zeros((4, 2), dtype=int)) for each in schedules])
