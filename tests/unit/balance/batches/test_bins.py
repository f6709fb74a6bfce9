"""Bins of several costs: each item once, limits kept, compiled as in Python."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.batches import bins as module
from equipoise.balance.batches.bins import exchange, into_bins, place, shelve
from equipoise.schedule.compiled import compile_loop

ITEMS = st.integers(1, 3).flatmap(
    lambda costs: st.lists(
        st.lists(st.integers(0, 10**6), min_size=costs, max_size=costs), min_size=1, max_size=30
    ).map(lambda rows: np.array(rows, dtype=np.int64))
)
BINS = st.integers(1, 9)


def heaviest(loads: np.ndarray, bin_of: np.ndarray, bins: int) -> int:
    load = np.zeros((bins, loads.shape[1]), dtype=np.int64)
    np.add.at(load, bin_of, loads)
    return int(load.max(0).sum())


@given(ITEMS, BINS, st.data())
def test_limits_hold_and_exchanges_only_help(loads, bins, data) -> None:
    sizes = data.draw(st.lists(st.integers(1, 100), min_size=len(loads), max_size=len(loads)))
    sizes = np.array(sizes)[:, None]
    limits = np.array([data.draw(st.integers(int(sizes.max()), int(sizes.sum())))])
    placed = place(loads, sizes, limits, bins)
    bin_of = into_bins(loads, sizes, limits, bins)
    if placed is None or bin_of is None:
        assert placed is bin_of is None
        return
    assert ((bin_of >= 0) & (bin_of < bins)).all()
    assert np.bincount(bin_of, sizes[:, 0], bins).max() <= limits[0]
    assert heaviest(loads, bin_of, bins) <= heaviest(loads, placed, bins)
    assert len(np.unique(bin_of)) >= len(np.unique(placed))


@given(ITEMS, st.integers(1, 5), st.integers(1, 5))
def test_shelves_are_as_high_as_their_first_item(loads, ranks, turns) -> None:
    whole = loads.sum(1)
    cell_of, filled = shelve(whole, loads[:, :1], np.array([10**9]), ranks, turns)
    assert filled < turns
    for turn in range(filled):
        mine = cell_of // ranks == turn
        work = np.bincount(cell_of[mine] % ranks, whole[mine], ranks)
        assert work.max() == whole[mine].max()
    assert (cell_of[cell_of >= 0] < filled * ranks).all()


@given(ITEMS, BINS, st.integers(1, 4))
def test_compiled_and_python_find_the_same(loads, bins, turns) -> None:
    sizes = loads[:, :1] + 1
    limits = np.array([int(sizes.sum() // 2 + sizes.max())])

    def answers() -> list[list[int]]:
        placed = place(loads, sizes, limits, bins)
        shelved, _ = shelve(loads.sum(1), sizes, limits, bins, turns)
        rows = [shelved.tolist()]
        if placed is not None:
            rows.append(placed.tolist())
            exchange(loads, sizes, limits, placed, bins)
            rows.append(placed.tolist())
        return rows

    compile_loop.cache_clear()
    in_python = answers()
    compile_loop(module.fill_loop)
    assert answers() == in_python
    compile_loop.cache_clear()


def test_enough_items_leave_no_bin_empty() -> None:
    loads = np.array([[100], [1], [1], [1]])
    assert sorted(into_bins(loads, loads, np.array([999]), 4).tolist()) == [0, 1, 2, 3]
