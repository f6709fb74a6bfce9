"""Strategies of layers against all assignments tried one by one."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from equipoise.plan.layers.search import assign_strategies


def path_s(path, seconds, kinds, enter, leave) -> float:
    before, total = 0, 0.0
    for layer, each in enumerate(path):
        total += enter[layer, before, kinds[each]] + seconds[layer, each]
        before = kinds[each]
    return total + leave[before]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(-1, 14), st.data())
def test_the_fastest_of_all_assignments(layers, count, kinds_count, budget, data) -> None:
    draw = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    seconds = draw.integers(0, 9, (layers, count)).astype(np.float64)
    units = draw.integers(0, 6, (layers, count))  # layers that take nothing among them
    kinds = draw.integers(0, kinds_count, count)
    enter = draw.integers(0, 5, (layers, kinds_count, kinds_count)).astype(np.float64)
    leave = draw.integers(0, 5, kinds_count).astype(np.float64)
    found = assign_strategies(seconds, units, kinds, enter, leave, budget=budget)
    at = np.arange(layers)
    legal = [
        path
        for path in itertools.product(range(count), repeat=layers)
        if units[at, list(path)].sum() <= budget
    ]
    if not legal:
        assert found is None
        return
    assert found is not None
    assert units[at, found.strategies].sum() <= budget
    least = min(path_s(path, seconds, kinds, enter, leave) for path in legal)
    assert found.seconds == path_s(found.strategies, seconds, kinds, enter, leave) == least


def test_changing_is_not_worth_it_where_entering_is_dear() -> None:
    seconds = np.array([[2.0, 1.0]] * 3)
    units, kinds = np.zeros((3, 2), dtype=np.int64), np.array([0, 1])
    enter = np.broadcast_to(np.array([[0.0, 2.0], [2.0, 0.0]]), (3, 2, 2))
    leave = np.array([0.0, 2.0])
    found = assign_strategies(seconds, units, kinds, enter, leave, budget=0)
    assert found is not None and found.strategies.tolist() == [0, 0, 0]
    cheap = assign_strategies(seconds, units, kinds, enter / 4, leave / 4, budget=0)
    assert cheap is not None and cheap.strategies.tolist() == [1, 1, 1]
