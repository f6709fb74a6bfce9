"""Rows that are alike, against a dictionary of tuples."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from equipoise.plan.space.columns import group_equal


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 90_000), st.integers(0, 1))))
def test_groups_are_rows_of_one_tuple(rows: list[tuple[int, int, int]]) -> None:
    columns = list(np.array(rows, dtype=np.int64).reshape(-1, 3).T)
    expected: dict[tuple[int, ...], list[int]] = {}
    for at, row in enumerate(rows):
        expected.setdefault(row, []).append(at)
    found = [group.tolist() for group in group_equal(columns)]
    assert sorted(found) == sorted(expected.values())
