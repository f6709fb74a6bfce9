"""Families whose stages are known are bounded before others."""

import heapq

import numpy as np

from equipoise.cost.step.request import StepOptions
from equipoise.plan.search.dive import dive
from equipoise.plan.search.stage import Item
from equipoise.plan.space.columns import list_space
from equipoise.spec.words import read_model

MODEL = read_model("layers=8,hidden=2048,heads=16,kv_heads=4,vocab=32000")


def test_bounds_rise_where_layers_are_alike() -> None:
    space = list_space(MODEL, 8, StepOptions(4096, 16), fixed={"pp": 4, "cp": 1})
    rows = np.arange(0, len(space), 3)
    members = [np.array([row]) for row in rows.tolist()]
    draw = np.random.default_rng(0).uniform(1.0, 3.0, len(rows)).tolist()
    queue: list[Item] = [(bound, 1, at) for at, bound in enumerate(draw)]
    heapq.heapify(queue)
    count = dive(
        queue, members, space, lambda items: [2.0] * len(items), limit=2.5, is_over=lambda: False
    )
    is_even = np.isin(space["recompute"][rows], [0, 1, 2, 6])
    assert count == sum(even and bound < 2.5 for even, bound in zip(is_even, draw, strict=True))
    assert 0 < count < len(rows)
    for bound, stage, at in queue:
        is_bounded = is_even[at] and draw[at] < 2.5
        assert (stage, bound) == ((2, max(draw[at], 2.0)) if is_bounded else (1, draw[at]))
    assert queue[0] == min(queue)


def test_without_time_nothing_is_bounded() -> None:
    space = list_space(MODEL, 8, StepOptions(4096, 16), fixed={"recompute": "none"})
    queue: list[Item] = [(1.0, 1, 0)]
    assert (
        dive(
            queue,
            [np.array([0])],
            space,
            lambda items: [2.0] * len(items),
            limit=9.0,
            is_over=lambda: True,
        )
        == 0
    )
    assert queue == [(1.0, 1, 0)]
