"""Grids: measured points are met, power laws held, the outside flagged."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.cost.curves.grid import LogGrid, Timing, build_grid, counted, provenance, read_table

TABLES = [
    "attention_a100.csv",
    "attention_h100.csv",
    "decode_a100.csv",
    "decode_h100.csv",
    "gemm_a100.csv",
    "gemm_h100.csv",
    "gemm_h200.csv",
    "nccl_a100.csv",
    "nccl_h100.csv",
]
SIZES = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=5, unique=True)


@st.composite
def grids(draw) -> tuple[dict[tuple[float, ...], list[float]], LogGrid]:
    axes = [sorted(draw(SIZES)) for _ in range(draw(st.integers(1, 3)))]
    places = [
        tuple(map(float, place))
        for place in np.stack(np.meshgrid(*axes), -1).reshape(-1, len(axes))
    ]
    points = {place: [draw(st.floats(1e-6, 10))] for place in places}
    return points, build_grid(points)


@given(grids())
def test_measured_points_are_met_and_not_flagged(found) -> None:
    points, grid = found
    timing = grid.at(*np.array(list(points)).T)
    assert np.allclose(timing.s, [s for (s,) in points.values()], rtol=1e-9)
    assert not timing.extrapolated.any()


@given(grids(), st.integers(0, 2**32 - 1))
def test_inside_no_time_leaves_the_range_and_outside_is_flagged(found, seed: int) -> None:
    points, grid = found
    generator = np.random.default_rng(seed)
    low, high = (
        np.array([axis[0] for axis in grid.axes]),
        np.array([axis[-1] for axis in grid.axes]),
    )
    sizes = low + (high - low) * generator.random((20, len(low)))
    timing = grid.at(*sizes.T)
    known = [s for (s,) in points.values()]
    assert timing.s.min() >= min(known) * (1 - 1e-9)
    assert timing.s.max() <= max(known) * (1 + 1e-9)
    beyond = grid.at(*(sizes * 0 + high * 2).T)
    assert beyond.extrapolated.all()
    at_end = grid.at(*high)
    assert np.allclose(beyond.s, at_end.s * 2 ** len(high))


def test_a_power_law_is_met_in_between() -> None:
    grid = build_grid({(x, y): [3e-6 * x**1.5 * y**0.5] for x in (1.0, 8, 512) for y in (2.0, 64)})
    x, y = np.array([3.0, 100, 300]), np.array([5.0, 17, 63])
    assert np.allclose(grid.at(x, y).s, 3e-6 * x**1.5 * y**0.5)


def test_below_an_axis_time_stays_or_shrinks_as_the_axis_says() -> None:
    points = {(4.0,): [1.0], (8.0,): [3.0]}
    assert build_grid(points).at(1.0).s == pytest.approx(1.0)
    assert build_grid(points, [(1.0, 2.0)]).at([1.0, 16.0]).s == pytest.approx([0.25, 12.0])


def test_holes_of_the_last_axis_are_filled_and_no_others() -> None:
    points = {(1, 4): [2.0], (2, 2): [1.0], (2, 8): [3.0]}
    grid = build_grid(points)
    assert grid.at(1, [2, 4, 8]).s == pytest.approx([2.0, 2.0, 4.0])
    assert grid.at(2, [2, 4, 8]).s == pytest.approx([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=re.escape("nothing was measured at the sizes (1, 2)")):
        build_grid({(1, 1, 1): [1.0], (2, 2, 1): [1.0]})


def test_repeats_are_averaged_in_the_logarithm() -> None:
    assert build_grid({(1,): [1.0, 4.0]}).at(1).s == pytest.approx(2.0)


def test_timings_add_and_scale() -> None:
    one = Timing(np.array([1.0, 2.0]), np.array([False, True]))
    both = one + counted([3.0, 4.0])
    assert both.total_s == 10.0
    assert both.extrapolated.all()
    assert one.scaled(2).s.tolist() == [2.0, 4.0]
    assert one.scaled(2).extrapolated.tolist() == [False, True]


@pytest.mark.parametrize("name", TABLES)
def test_shipped_tables_say_where_they_come_from(name: str) -> None:
    assert "aiconfigurator-core 0.12.0 (PyPI, Apache-2.0, NVIDIA), systems/data/" in provenance(
        name
    )
    rows = read_table(name)
    assert len(rows) > 200
    assert min(float(row["us"]) for row in rows) > 1
