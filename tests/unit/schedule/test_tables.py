"""Rows of a table have one shard and one place, under every kind of bucket."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError
from equipoise.schedule.tables.placement import RowMap, TablePlacement, TablePlan
from equipoise.spec.tables.table import TableSpec

TABLE = TableSpec("user", 10, 4)


@given(st.integers(1, 60), st.integers(1, 9), st.sampled_from(["contiguous", "modulo", "by-cost"]))
def test_every_row_lies_once(rows: int, shards: int, buckets: str) -> None:
    owner = np.random.default_rng(rows).integers(0, shards, rows)
    row_map = RowMap(rows, shards, buckets, owner if buckets == "by-cost" else None)
    held = [row_map.rows_of(shard) for shard in range(shards)]
    assert sorted(np.concatenate(held).tolist()) == list(range(rows))
    assert [len(each) for each in held] == [row_map.count(shard) for shard in range(shards)]
    assert all((np.diff(each) > 0).all() for each in held)
    if buckets == "by-cost":
        for shard, each in enumerate(held):
            assert row_map.place[each].tolist() == list(range(len(each)))
            assert (owner[each] == shard).all()


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        (
            [TablePlacement(TABLE, "table", (4,))],
            "Table user lies on ranks 4, and there are 4. Plan it for these ranks.",
        ),
        (
            [TablePlacement(TABLE, "data", (0, 1))],
            "Table user is data-parallel, so all 4 ranks hold it.",
        ),
        (
            [TablePlacement(TABLE, "table-row", (1, 2))],
            "Table user is divided inside a host, but ranks 1, 2 are not the 2 ranks of one, in "
            "order.",
        ),
        ([TablePlacement(TABLE, "table", (0,))] * 2, "Two tables have one name. Rename one."),
    ],
)
def test_plans_that_cannot_be_are_refused(placements: list[TablePlacement], message: str) -> None:
    with pytest.raises(LayoutError) as error:
        TablePlan(tuple(placements), 4, 2)
    assert str(error.value) == message


def test_placements_that_cannot_be_are_refused() -> None:
    with pytest.raises(LayoutError, match="lies whole on one rank, but 2 are given"):
        TablePlacement(TABLE, "table", (0, 1))
    with pytest.raises(LayoutError, match=r"has 4 columns for 5 shards. Give at most 4 ranks"):
        TablePlacement(TABLE, "column", (0, 1, 2, 3, 4))
    with pytest.raises(LayoutError, match="two buckets of rows on one rank"):
        TablePlacement(TABLE, "row", (1, 1))
    with pytest.raises(LayoutError, match="3 ranks cannot fill hosts of 2"):
        TablePlan((), 3, 2)
    with pytest.raises(LayoutError, match="need the shard of each of 10 rows"):
        RowMap(10, 2, "by-cost").rows_of(0)
    for words, said in (
        ({"kind": "rows"}, '"rows" is not one of table, row, table-row, column, data.'),
        ({"buckets": "hash"}, '"hash" is not one of contiguous, modulo, by-cost.'),
    ):
        with pytest.raises(LayoutError) as error:
            TablePlacement(**{"table": TABLE, "kind": "row", "ranks": (0, 1)} | words)
        assert str(error.value) == f"Table user: {said}"


def test_columns_are_cut_where_asked() -> None:
    cut = TablePlacement(TABLE, "column", (2, 0, 2), edges=(0, 1, 3, 4))
    assert [cut.columns(shard) for shard in range(3)] == [(0, 1), (1, 3), (3, 4)]
    for kind, edges in (("column", (0, 3, 3, 4)), ("column", (0, 2, 5)), ("row", (0, 2, 4))):
        with pytest.raises(LayoutError) as error:
            TablePlacement(TABLE, kind, (0, 1), edges=edges)
        assert str(error.value) == (
            f"Table user: columns cannot be cut at {', '.join(map(str, edges))}. Give ascending "
            "edges from 0 to 4, to a table of kind column."
        )
    with pytest.raises(LayoutError) as error:
        TablePlacement(TABLE, "column", (0, 1), edges=(0, 4))
    assert str(error.value) == (
        "Table user has 1 range of columns for 2 ranks. Give a rank for each."
    )


@pytest.mark.parametrize("bucket", [-1, 2])
def test_rows_of_no_bucket_are_refused(bucket: int) -> None:
    """They lay nowhere, and a batch that looked one up failed."""
    owner = np.array([0, 1] * 4 + [0, bucket])
    with pytest.raises(LayoutError) as error:
        TablePlacement(TABLE, "row", (0, 1), "by-cost", owner)
    assert str(error.value) == (
        f"Table user has rows in buckets {min(0, bucket)} to {max(1, bucket)}, and there are 2. "
        "Number them 0 to 1."
    )
