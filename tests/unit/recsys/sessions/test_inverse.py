"""Shared rows: what is expanded is what was given, whatever the hash; rows are distinct."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import DataError
from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.sessions.inverse import InverseJagged, SharedRows, hash_rows, share_rows

BAG = st.lists(st.integers(0, 2), max_size=2)
ROWS = st.lists(st.tuples(BAG, BAG, BAG), max_size=12)


def batch_of(rows: list[tuple[list[int], ...]]) -> KeyedJagged:
    return KeyedJagged.from_bags(
        {key: [list(row[place]) for row in rows] for place, key in enumerate("abc")}
    )


def weak(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Collides for most rows."""
    return hash_rows(values, starts) % np.uint64(2)


@given(ROWS, st.sampled_from([hash_rows, weak]))
def test_what_is_expanded_is_what_was_given(rows: list, row_hash: object) -> None:
    batch = batch_of(rows)
    shared = share_rows(batch, [["a", "c"]], row_hash=row_hash)
    distinct = list(dict.fromkeys((tuple(a), tuple(c)) for a, _, c in rows))
    assert shared.group_rows == [len(distinct), len(rows)]
    flat = shared.flatten()
    for key in "abc":
        for ours, theirs in zip(flat.bags(key), batch.bags(key), strict=True):
            assert ours.tolist() == theirs.tolist()
    group = shared.groups[0]
    if group.inverse is not None:
        expected = [distinct.index((tuple(a), tuple(c))) for a, _, c in rows]
        assert group.inverse.tolist() == expected  # in the order of first appearance


def test_one_row_and_rows_that_all_differ() -> None:
    one = share_rows(batch_of([([1], [2], [])] * 5), [["a", "b", "c"]])
    assert one.group_rows == [1]
    assert one.expand("a", torch.ones(1, 2)).shape == (5, 2)
    assert one.fold("a", torch.ones(5, 2)).tolist() == [[5.0, 5.0]]
    other = share_rows(batch_of([([i], [0], []) for i in range(5)]), [["a", "b", "c"]])
    assert other.groups[0].inverse is None


def test_a_row_with_one_feature_changed_is_another() -> None:
    rows = [([1, 2], [0], [1]), ([1, 2], [0], [2]), ([1], [2, 0], [1])]
    assert share_rows(batch_of(rows), [["a", "b", "c"]]).group_rows == [3]


def test_what_is_wrong_is_one_sentence() -> None:
    batch = batch_of([([1], [2], [])])
    with pytest.raises(DataError, match=r"^Two groups have the feature a\. Name it once\.$"):
        share_rows(batch, [["a", "b"], ["a"]])
    with pytest.raises(DataError, match=r"^A group has no feature\. Leave it out\.$"):
        share_rows(batch, [["a"], []])
    with pytest.raises(DataError, match="The batch has no feature z; it has a, b, c"):
        share_rows(batch, [["z"]])
    shared = share_rows(batch, [["a"]])
    with pytest.raises(DataError, match=r"no feature z; it has a, b, c\. Add it, or drop its"):
        shared.bags("z")
    two = SharedRows(batch_of([([1], [], [])] * 2), None)
    with pytest.raises(DataError, match=r"have different numbers of samples: 1, 1, 2\.$"):
        InverseJagged((*shared.groups, two))
