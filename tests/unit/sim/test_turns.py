"""Turns that ranks begin and end together."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from equipoise.cost.work import causal_pairs, useful_flop
from equipoise.sim.turns import fullest_turns, slowest_turns
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import preset

MODEL = preset("2m")
BATCH = st.lists(st.integers(1, 5000), min_size=1, max_size=4)


def work(batch) -> int:
    return useful_flop(MODEL, sum(batch), int(sum(causal_pairs(n) for n in batch)))


@given(st.data(), st.integers(2, 5), st.integers(1, 4), st.integers(0, 3))
def test_no_rank_takes_longer_than_the_slowest_turns(data, dp: int, turns: int, zero: int) -> None:
    rows = data.draw(
        st.lists(st.lists(BATCH, min_size=turns, max_size=turns), min_size=dp, max_size=dp)
    )
    layout = Layout(dp=dp, zero=zero)
    found = slowest_turns(MODEL, layout, rows)
    if zero < 2:
        assert found == rows
        assert fullest_turns(layout, rows) is None
        return
    (paced,) = found
    assert [work(batch) for batch in paced] == [
        max(map(work, turn)) for turn in zip(*rows, strict=True)
    ]
    assert fullest_turns(layout, rows) == [max(map(sum, turn)) for turn in zip(*rows, strict=True)]
    assert sum(map(work, paced)) >= max(sum(map(work, row)) for row in rows)


def test_experts_of_other_ranks_are_waited_for() -> None:
    rows = [[[4], [2]], [[2], [5]]]
    layout = Layout(dp=2, ep=2)
    assert slowest_turns(MODEL, layout, rows) == [[[4], [5]]]
    assert slowest_turns(MODEL, dataclasses.replace(layout, ep=1), rows) == rows
