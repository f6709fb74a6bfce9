"""Exact partitions: never worse than the heuristic, proven on small cases by trying all."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.exact import exact_partition
from equipoise.balance.packing.pack import pack_step
from equipoise.balance.partition import partition
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import break_even_curve
from equipoise.spec.run.spec import PackSpec

CURVE = break_even_curve(64)


@settings(max_examples=12)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=7).map(np.array), st.integers(1, 3))
def test_small_cases_are_solved(weights, bins) -> None:
    found = exact_partition(weights, bins)
    best = min(
        int(np.bincount(bin_of, weights, bins).max())
        for bin_of in itertools.product(range(bins), repeat=len(weights))
    )
    assert found.heaviest == best == int(np.bincount(found.bin_of, weights, bins).max())
    assert found.bound <= best


@settings(max_examples=12)
@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3))
def test_small_cases_keep_their_capacity(data, sizes, bins) -> None:
    sizes = np.array(sizes)
    weights = np.array(
        data.draw(st.lists(st.integers(0, 40), min_size=len(sizes), max_size=len(sizes)))
    )
    capacity = data.draw(st.integers(1, int(sizes.sum())))
    fits = [
        int(np.bincount(bin_of, weights, bins).max())
        for bin_of in itertools.product(range(bins), repeat=len(sizes))
        if np.bincount(bin_of, sizes, bins).max() <= capacity
    ]
    if not fits:
        with pytest.raises(LayoutError, match="no partition does"):
            exact_partition(weights, bins, sizes=sizes, capacity=capacity)
        return
    found = exact_partition(weights, bins, sizes=sizes, capacity=capacity)
    assert found.heaviest == min(fits)
    assert np.bincount(found.bin_of, sizes, bins).max() <= capacity


def test_a_little_effort_is_never_worse_than_the_heuristic() -> None:
    weights = np.random.default_rng(0).integers(1, 10**6, 60)
    heuristic = partition(weights, 7)
    found = exact_partition(weights, 7, effort=0.02)
    assert found.heaviest <= np.bincount(heuristic, weights, 7).max()
    assert found.bound <= found.heaviest
    assert found.is_optimal == (found.bound == found.heaviest)


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(
        LayoutError,
        match=re.escape(
            "3 items of 21 in all were not fitted into 2 bins of 13: no partition does. Give "
            "more bins, or a capacity above 13."
        ),
    ):
        exact_partition(np.array([1, 1, 1]), 2, sizes=np.array([7, 7, 7]), capacity=13)


def test_fixed_exact_cuts_nothing_where_that_is_possible() -> None:
    pieces = np.array([[0, 0, 60], [1, 0, 40], [2, 0, 50], [3, 0, 30], [4, 0, 20]])
    pack = PackSpec(policy="fixed-exact", context_tokens=100)
    packed = pack_step(pieces, pack, 2, CURVE)
    rows = np.concatenate([batch.pieces for batch in packed])
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, pieces.tolist()))
    assert packed.rank_tokens == [100, 100]


def test_fixed_exact_is_fixed_where_windows_cannot_be_full_of_whole_documents() -> None:
    pieces = np.array([[0, 0, 70], [1, 0, 70], [2, 0, 60]])
    exact, greedy = (
        pack_step(pieces, PackSpec(policy=policy, context_tokens=100), 2, CURVE)
        for policy in ("fixed-exact", "fixed")
    )
    assert exact.ranks[0][0].pieces.tolist() == greedy.ranks[0][0].pieces.tolist()
