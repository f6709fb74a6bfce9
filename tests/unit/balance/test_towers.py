"""Tables of towers lie on their tower's host, and no plan is below its bound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.tables.price import TableMachine
from equipoise.balance.tables.towers import plan_towers
from equipoise.base.errors import LayoutError
from equipoise.schedule.tables.placement import TablePlacement, TablePlan, TowerPlacement
from equipoise.schedule.tables.traffic import across_hosts, count_traffic
from equipoise.spec.tables.read import draw_tables
from equipoise.spec.tables.table import TableSpec
from equipoise.spec.towers import TowerSizes

IDENTITY = TowerSizes("identity", 16, 0, 0, 8)


def tables_of(count: int, seed: int) -> list[TableSpec]:
    return [TableSpec(t.name, t.rows, 16, t.ids_per_sample) for t in draw_tables(count, seed)]


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([(2, 1), (4, 2), (8, 2), (6, 3)]),
    st.integers(1, 2),
    st.sampled_from([("table",), ("table", "row"), ("table-row", "column"), ("row", "data")]),
)
def test_tables_lie_on_the_host_of_their_tower(
    seed: int, shape: tuple[int, int], each: int, kinds: tuple[str, ...]
) -> None:
    ranks, per_host = shape
    towers = each * ranks // per_host
    tables = tables_of(3 * towers, seed)
    names = [tuple(t.name for t in tables[at::towers]) for at in range(towers)]
    machine = TableMachine(ranks, 64, 1e10, 2e9, 5e8, per_host)
    answer = plan_towers(tables, names, IDENTITY, machine, kinds=kinds)
    assert [placed.table for placed in answer.plan.placements] == tables
    hosts = [tower.host for tower in answer.plan.towers]
    assert sorted(hosts) == sorted(each * list(range(ranks // per_host)))
    for placed in answer.plan.placements:
        host = answer.plan.tower_of(placed.table.name).host
        assert {rank // per_host for rank in placed.ranks} == {host}
        assert placed.kind in ("table", "column", "table-row")
    assert int((answer.compute_ps + answer.exchange_ps).max()) >= answer.bound_ps > 0
    held = sum(table.weight_bytes for table in tables)
    assert answer.held_bytes.sum() >= held


def test_towers_without_modules_cross_hosts_with_the_bytes_of_whole_tables() -> None:
    tables = tables_of(6, 0)
    names = [tuple(t.name for t in tables[at::2]) for at in range(2)]
    machine = TableMachine(4, 8, 1e10, 2e9, 5e8, 2)
    crossed = []
    for sizes in (IDENTITY, TowerSizes("linear", 16, 1, 8, 8)):
        plan = plan_towers(tables, names, sizes, machine, kinds=["table"]).plan
        flat = TablePlan(plan.placements, 4, 2)
        ids = {t.name: np.full((4, 1), 5) for t in tables}
        for each in (plan, flat):
            sent = count_traffic(each, [8] * 4, ids, {})
            crossed.append(
                sum(across_hosts(each, sent[stage]) for stage in ("pooled", "gradients"))
            )
    identity, flat, linear, again = crossed
    assert identity == flat == again == 6 * linear


def test_what_does_not_divide_is_refused() -> None:
    tables, machine = tables_of(3, 0), TableMachine(4, 8, 1e10, 2e9, 5e8, 2)
    names = [(t.name,) for t in tables]
    with pytest.raises(LayoutError) as error:
        plan_towers(tables, names, IDENTITY, machine, kinds=["table"])
    assert str(error.value) == "3 towers do not divide over 2 hosts. Give a multiple of 2."
    with pytest.raises(LayoutError) as error:
        plan_towers(tables[:2], [("t0",), ("x",)], IDENTITY, machine, kinds=["table"])
    assert str(error.value) == (
        "Towers hold t0, x, and the tables are t0, t1. Put each table into one tower."
    )
    with pytest.raises(LayoutError) as error:
        plan_towers(tables[:2], names[:2], IDENTITY, machine, kinds=["data"])
    assert str(error.value) == (
        "The tables of a tower lie on its host, and data puts them on all ranks. Allow table, row "
        "or column."
    )


def test_a_plan_keeps_tables_on_the_host_of_their_tower() -> None:
    a, b = TableSpec("a", 9, 4), TableSpec("b", 9, 4)

    def refused(towers: tuple[tuple[str, ...], ...], *placed: TablePlacement) -> str:
        given_towers = tuple(TowerPlacement(names, at, 1, 4) for at, names in enumerate(towers))
        with pytest.raises(LayoutError) as error:
            TablePlan(placed, 2, 1, given_towers)
        return str(error.value)

    left, right = TablePlacement(a, "table", (0,)), TablePlacement(b, "table", (1,))
    assert refused((("a",),), left, right) == (
        "Towers hold a, and the tables are a, b. Put each table into one tower."
    )
    assert refused((("b",), ("a",)), left, right) == (
        "Table a lies on ranks 0, and its tower is on host 1 of 2, which has 1 rank. Place it "
        "there."
    )
    assert refused((("a",), ("b",)), left, TablePlacement(b, "row", (0, 1))) == (
        "Table b is in a tower and of kind row, which reaches beyond a host. Place it as table, "
        "table-row or column."
    )
