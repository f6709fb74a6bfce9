"""Columns cut where ranks are full: whole tables, loads of their shards, never a slower plan."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.tables.level import level_columns
from equipoise.balance.tables.plan import TableAnswer, plan_tables
from equipoise.balance.tables.price import TableMachine, price_shard
from equipoise.schedule.tables.placement import TablePlacement, TablePlan
from equipoise.spec.tables.read import read_tables
from equipoise.spec.tables.table import TableSpec, row_bytes


def machine(ranks: int, **more: object) -> TableMachine:
    return TableMachine(ranks, 256, 2e12, 4e11, 5e10, **more)


def dealt_round(tables: list[TableSpec], own: TableMachine) -> TableAnswer:
    """Whole tables, one after the other, and their loads."""
    compute, exchange, held = (np.zeros(own.ranks, dtype=np.int64) for _ in range(3))
    for at, table in enumerate(tables):
        price = price_shard(table, own)
        compute[at % own.ranks] += price.compute_ps
        exchange[at % own.ranks] += price.exchange_ps
        held[at % own.ranks] += table.rows * row_bytes(table.width, own.optimizer)
    placed = [TablePlacement(t, "table", (at % own.ranks,)) for at, t in enumerate(tables)]
    bound = int((compute + exchange).sum()) // own.ranks
    plan = TablePlan(tuple(placed), own.ranks)
    return TableAnswer(plan, own, compute, exchange, held, bound)


def require_sums(answer: TableAnswer) -> None:
    """Loads and bytes are those of the shards; each table's columns are all there once."""
    sums = np.zeros((3, answer.machine.ranks), dtype=np.int64)
    for each in answer.plan.placements:
        assert [*each.column_edges] == sorted({0, *each.column_edges, each.table.width})
        for shard, rank in enumerate(each.ranks):
            begin, end = each.columns(shard)
            price = price_shard(each.table, answer.machine, columns=end - begin)
            held = each.table.rows * row_bytes(end - begin, answer.machine.optimizer)
            sums[:, rank] += price.compute_ps, price.exchange_ps, held
    got = np.stack((answer.compute_ps, answer.exchange_ps, answer.held_bytes))
    assert got.tolist() == sums.tolist()


SIZES = st.tuples(st.integers(1, 900), st.integers(1, 40), st.sampled_from([1, 4, 16, 64]))


@settings(max_examples=40, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=20), st.integers(1, 7), st.booleans())
def test_columns_are_dealt_whole_and_never_slower(
    sizes: list[tuple[int, int, int]], ranks: int, is_tight: bool
) -> None:
    tables = [TableSpec(f"t{at}", n, w, float(ids)) for at, (n, ids, w) in enumerate(sizes)]
    whole = dealt_round(tables, machine(ranks))
    if is_tight:
        whole = dealt_round(tables, machine(ranks, capacity_bytes=int(whole.held_bytes.max())))
    answer = level_columns(whole)
    require_sums(answer)
    assert answer.bound_ps <= answer.most_ps <= whole.most_ps
    assert answer.held_bytes.max() <= answer.machine.capacity_bytes
    again = level_columns(whole)
    assert [p.ranks for p in again.plan.placements] == [p.ranks for p in answer.plan.placements]


@pytest.mark.parametrize(("ranks", "gap"), [(8, 0.04), (16, 0.08), (24, 0.1)])
def test_equal_tables_that_do_not_divide_fill_all_ranks(ranks: int, gap: float) -> None:
    """Whole, 26 of them leave the slowest of 16 ranks 23% above the mean; evenly cut, 18%."""
    tables = [TableSpec(f"t{at}", 10_000_000, 16) for at in range(26)]
    answer = plan_tables(tables, TableMachine(ranks, 512, 2e10, 1e10, 1e10))
    assert answer.gap < gap
    assert answer.skew < 1.03 + (ranks == 24) / 50  # a column is 6% of a rank's share there
    require_sums(answer)
    alone = plan_tables(tables, TableMachine(ranks, 512, 2e10, 1e10, 1e10), kinds=["column"])
    assert {each.kind for each in alone.plan.placements} == {"column"}


def test_published_tables_come_out_even() -> None:
    for name, ranks in (("criteo-kaggle", 8), ("criteo-kaggle", 16), ("mlperf-dcnv2", 16)):
        tables, _ = read_tables(name)
        answer = plan_tables(tables, TableMachine(ranks, 2048, 3.35e12, 4.5e11, 5e10, 8))
        assert answer.skew < 1.03, (name, ranks, answer.skew)
        assert answer.gap < 0.1, (name, ranks, answer.gap)
