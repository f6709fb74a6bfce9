"""What crosses between ranks that encode and ranks that read: each row once, in bounded rounds."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import CheckError
from equipoise.schedule.modality.bridge import BridgePlan, Readers, check_bridge, plan_bridge
from equipoise.schedule.modality.readers import read_rows
from equipoise.spec.modality.items import Items
from equipoise.spec.pack import MicroBatch, PackedStep


def _none(item: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    raise AssertionError(item)


def _items(documents: list[list[tuple[int, int]]]) -> Items:
    """Items of documents, each by its first token and its rows."""
    flat = np.array([each for items in documents for each in items], dtype=np.int64).reshape(-1, 2)
    first = np.cumsum([0, *map(len, documents)])
    grid = np.stack((flat[:, 1] * 2, np.full(len(flat), 2)), axis=1)
    return Items(first, flat[:, 0], flat[:, 1], np.zeros(len(flat), np.int64), grid, grid, _none)


def _plan(seed: int, ranks: int, items: int, round_rows: int) -> BridgePlan:
    draw = np.random.default_rng(seed)
    rows = draw.integers(1, 9, items)
    item = np.repeat(np.arange(items), rows)
    item_row = np.concatenate([np.arange(n) for n in rows]) if items else item
    rank, turn = draw.integers(0, ranks, len(item)), draw.integers(0, 3, len(item))
    row = draw.permutation(len(item))
    readers = Readers(item, item_row, rank, turn, row)
    return plan_bridge(
        readers, draw.integers(0, ranks, items), rows, ranks=ranks, round_rows=round_rows
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(0, 12), st.integers(1, 20))
def test_rounds_carry_every_row_once_and_are_bounded(
    seed: int, ranks: int, items: int, round_rows: int
) -> None:
    plan = _plan(seed, ranks, items, round_rows)
    check_bridge(plan)
    away = ~np.eye(ranks, dtype=np.bool_)
    rounds = [plan.rows_of_round(number) * away for number in range(plan.rounds)]
    assert (sum(rounds, np.zeros_like(plan.sent)) == plan.sent * away).all()
    most = round_rows + ranks - 1
    assert all(max(each.sum(0).max(), each.sum(1).max()) <= most for each in rounds)
    assert plan.bytes(4, element_bytes=2).sum() == 2 * 8 * (plan.sent * away).sum()
    for source, target, span in plan.spans():
        assert (plan.owner[plan.readers.item[span]] == source).all()
        assert (plan.readers.rank[span] == target).all()
    assert plan.digest == _plan(seed, ranks, items, round_rows).digest


def test_windows_cut_items_and_repeated_documents_read_them_twice() -> None:
    items = _items([[(1, 4)], [], [(0, 2), (3, 1)]])

    def batch(*pieces: tuple[int, int, int]) -> MicroBatch:
        return MicroBatch(np.array(pieces, dtype=np.int64))

    packed = PackedStep("by-work", ((batch((0, 0, 3), (1, 0, 5)),), (batch((2, 0, 5), (3, 2, 6)),)))

    def embeds(data_rank: int, turn: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = packed.ranks[data_rank][turn].tokens
        return np.full(tokens, data_rank), np.arange(tokens)

    chosen, readers = read_rows(packed, items, 3, embeds)
    assert chosen.tolist() == [0, 1, 2]
    read = sorted(
        zip(*(getattr(readers, f.name).tolist() for f in dataclasses.fields(readers)), strict=True)
    )
    assert read == [
        *((0, 0, 0, 0, 1), (0, 1, 0, 0, 2)),  # tokens 1 and 2 of document 0, cut at 3
        *((0, 1, 1, 0, 5), (0, 2, 1, 0, 6), (0, 3, 1, 0, 7)),  # the same document again, from 2 on
        *((1, 0, 1, 0, 0), (1, 1, 1, 0, 1), (2, 0, 1, 0, 3)),
    ]


def test_plans_that_are_wrong_are_named() -> None:
    plan = _plan(3, 2, 3, 4)
    readers = plan.readers
    short = dataclasses.replace(plan, item_rows=np.ones_like(plan.item_rows))
    with pytest.raises(CheckError) as refused:
        check_bridge(short)
    at = int(np.flatnonzero(readers.item_row > 0)[0])
    assert str(refused.value) == (
        f"Row {readers.item_row[at]} of item {readers.item[at]} is read, but it has 1 rows. Make "
        "the plan again from the pack."
    )
    same = dataclasses.replace(
        readers, **{k: np.zeros_like(readers.row) for k in ("rank", "turn", "row")}
    )
    with pytest.raises(CheckError) as refused:
        check_bridge(dataclasses.replace(plan, readers=same))
    assert str(refused.value) == (
        "Row 0 of micro-batch 0 on rank 0 would be filled twice. Make the plan again from the pack."
    )
    owner, place = np.array([0]), np.zeros(1, np.int64)
    lost = BridgePlan(2, owner, np.array([1]), Readers(place, place, place + 1, place, place), 0)
    with pytest.raises(CheckError) as refused:
        check_bridge(lost)
    assert str(refused.value) == (
        "Rank 0 sends 0 rows to rank 1 in 0 rounds, but 1 are read there. Make the plan again "
        "from the pack."
    )
