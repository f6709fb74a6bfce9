"""Features dealt to towers: even, and as alike as any deal of few features."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.tables.similar import (
    TOWER_GOALS,
    deal_features,
    draw_towers,
    load_cap,
    measure_likeness,
)
from equipoise.base.errors import LayoutError


def drawn(seed: int, features: int) -> tuple[np.ndarray, np.ndarray]:
    """Similarities of features that lie near a few directions, and their loads."""
    source = np.random.default_rng(seed)
    rows = source.standard_normal((features, 4))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return np.abs(rows @ rows.T), source.integers(1, 9, features)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7), st.data())
def test_no_deal_of_few_features_is_better(seed: int, features: int, data: st.DataObject) -> None:
    towers = data.draw(st.integers(1, min(3, features)))
    alike, costs = drawn(seed, features)
    cap = load_cap(costs, towers)
    deals = [
        np.array(each)
        for each in itertools.product(range(towers), repeat=features)
        if len(set(each)) == towers and np.bincount(each, costs, towers).max() <= cap
    ]
    for goal, best in zip(TOWER_GOALS, (max, min), strict=True):
        answer = deal_features(alike, costs.tolist(), towers, goal)
        assert np.bincount(answer, costs, towers).max() <= cap
        assert sorted(set(answer.tolist())) == list(range(towers))
        reached = best(measure_likeness(alike, each) for each in deals)
        assert measure_likeness(alike, answer) == pytest.approx(reached)
        assert np.array_equal(answer, deal_features(alike, costs.tolist(), towers, goal))


def test_many_features_are_even_and_beat_random_draws() -> None:
    alike, costs = drawn(1, 40)
    source = np.random.default_rng(0)
    for towers in (2, 4, 8):
        draws = [draw_towers(costs, towers, source) for _ in range(100)]
        assert len({each.tobytes() for each in draws}) == 100
        assert max(np.bincount(each, costs, towers).max() for each in draws) <= load_cap(
            costs, towers
        )
        scores = [measure_likeness(alike, each) for each in draws]
        for goal, worst in (("coherent", max(scores)), ("diverse", min(scores))):
            answer = deal_features(alike, costs.tolist(), towers, goal)
            loads = np.bincount(answer, costs, towers)
            assert loads.max() / loads.mean() <= 1.05
            reached = measure_likeness(alike, answer)
            assert reached > worst if goal == "coherent" else reached < worst


def test_more_towers_than_features_are_refused() -> None:
    with pytest.raises(LayoutError) as error:
        deal_features(np.eye(2), [1, 1], 3)
    assert str(error.value) == (
        "2 features cannot fill 3 towers, each with one at least. Give from 1 to 2 towers."
    )
