"""Place the tables of towers: each tower on one host, its tables on the ranks of that host.

What it decides
    Towers go to hosts by what their lookups cost, equally many to each. Inside a host tables are
    placed as ``plan_tables`` does, for the samples of all ranks: ids arrive from every rank, pooled
    rows stay inside, and what towers make of them crosses between ranks of equal place.

    The bound is that of the costliest host, for these towers.

Kept true (tests/unit/balance/test_towers.py)
    Every table lies on its tower's host; never below the bound; tables without towers cross hosts
    with as many bytes as towers that pass vectors on.

Sources
    L. Luo et al., "Disaggregated Multi-Tower", arXiv:2403.00877, section 3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from equipoise.balance.partition import partition
from equipoise.balance.tables.plan import TableAnswer, plan_tables
from equipoise.balance.tables.price import PS_PER_S, TableMachine, price_shard
from equipoise.balance.tables.similar import deal_features
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.schedule.tables.placement import (
    ShardKind,
    TablePlacement,
    TablePlan,
    TowerPlacement,
    require_each_once,
)
from equipoise.schedule.tables.traffic import wire_bytes
from equipoise.spec.tables.table import TableSpec
from equipoise.spec.towers import TowerSizes


def plan_towers(
    tables: Sequence[TableSpec],
    towers: Sequence[Sequence[str]],
    sizes: TowerSizes,
    machine: TableMachine,
    *,
    kinds: Sequence[ShardKind],
    row_counts: Mapping[str, Ints] | None = None,
) -> TableAnswer:
    """Place tables on the hosts of their towers.

    Args:
        tables: What is placed, all of one width.
        towers: The tables of each tower.
        sizes: What a tower makes of their vectors.
        machine: All ranks.
        kinds: Which kinds of sharding may be used; rows are divided inside a host, and copies of a
            table on every rank are not for towers.
        row_counts: As for ``plan_tables``.

    Raises:
        LayoutError: towers do not divide over the hosts, or do not hold each table once; or no
            kind is left.
        FitError: a host's tables do not fit it.

    >>> two = [TableSpec("a", 10, 4), TableSpec("b", 10, 4)]
    >>> sizes = TowerSizes("identity", 4, 0, 0, 8)
    >>> answer = plan_towers(two, ["a", "b"], sizes, TableMachine(2, 8, 1e9, 1e9, 1e9, 1),
    ...                      kinds=["table"])
    >>> [(each.host, each.vectors) for each in answer.plan.towers]
    [(0, 1), (1, 1)]
    """
    hosts, local = machine.ranks // machine.per_host, machine.per_host
    if len(towers) % hosts:
        raise LayoutError(
            f"{len(towers)} towers do not divide over {hosts} hosts. Give a multiple of {hosts}."
        )
    near = _near_kinds(kinds)
    by_name = {table.name: table for table in tables}
    require_each_once([name for tower in towers for name in tower], list(by_name))
    weights = [sum(price_feature(by_name[n], sizes, machine) for n in tower) for tower in towers]
    host_of = _deal(np.array(weights, dtype=np.int64), hosts)
    placed: dict[str, TablePlacement] = {}
    compute, exchange, held = (np.zeros(machine.ranks, dtype=np.int64) for _ in range(3))
    bound = 0
    inside = _one_host(machine)
    chosen = [
        TowerPlacement(
            tuple(tower), host_of[at], *sizes.leaving(len(tower)), sizes.count_weights(len(tower))
        )
        for at, tower in enumerate(towers)
    ]
    for host in range(hosts):
        own = [by_name[n] for tower in chosen if tower.host == host for n in tower.tables]
        answer = plan_tables(own, inside, kinds=near, row_counts=row_counts)
        across = _across_ps([tower for tower in chosen if tower.host == host], machine)
        first = host * local
        for each in answer.plan.placements:
            kind: ShardKind = "table-row" if each.kind == "row" else each.kind
            ranks = tuple(first + rank for rank in each.ranks)
            placed[each.table.name] = replace(each, kind=kind, ranks=ranks)
        near_ranks = slice(first, first + local)
        compute[near_ranks] = answer.compute_ps
        exchange[near_ranks] = answer.exchange_ps + across
        held[near_ranks] = answer.held_bytes
        bound = max(bound, answer.bound_ps + across)
    placements = tuple(placed[table.name] for table in tables)
    plan = TablePlan(placements, machine.ranks, machine.ranks_per_host, tuple(chosen))
    return TableAnswer(plan, machine, compute, exchange, held, bound)


def price_feature(table: TableSpec, sizes: TowerSizes, machine: TableMachine) -> int:
    """What a table adds to its host's step, over the host's ranks, in picoseconds."""
    alone = TowerPlacement((table.name,), 0, 0 if sizes.vectors else 1, sizes.leaving(1)[1])
    across = machine.per_host * _across_ps([alone], machine)
    return price_shard(table, _one_host(machine)).total_ps + across


def _one_host(machine: TableMachine) -> TableMachine:
    """The ranks of a host, which look up the samples of all."""
    return replace(
        machine,
        ranks=machine.per_host,
        ranks_per_host=machine.per_host,
        batch=machine.samples // machine.per_host,
        visitors=machine.ranks - machine.per_host,
    )


def plan_even_towers(
    tables: Sequence[TableSpec],
    towers: int,
    width: int | None,
    machine: TableMachine,
    kinds: Sequence[ShardKind],
) -> TableAnswer:
    """Place tables in towers of equal load, where nothing is known of their likeness.

    Args:
        tables: What is placed.
        towers: How many towers.
        width: Floats to which each row is cut before it leaves its host; None: not cut.
        machine: All ranks.
        kinds: As for ``plan_towers``.

    Raises:
        LayoutError: more towers than tables, tables of several widths, or as ``plan_towers``.
    """
    widths = sorted({table.width for table in tables})
    if len(widths) > 1:
        raise LayoutError(
            f"Towers condense vectors of one width, and the tables have "
            f"{', '.join(map(str, widths))}. Choose tables of one width."
        )
    if width is not None and width > widths[0]:
        raise LayoutError(
            f"Towers cut rows of {widths[0]} floats to {width}, which is more. Give at most "
            f"{widths[0]}."
        )
    sizes = TowerSizes("identity" if width is None else "linear", widths[0], 0, width or 0, 1)
    costs = [price_feature(table, sizes, machine) for table in tables]
    tower_of = deal_features(np.eye(len(tables)), costs, towers)
    names = [
        [table.name for table, own in zip(tables, tower_of.tolist(), strict=True) if own == tower]
        for tower in range(towers)
    ]
    return plan_towers(tables, names, sizes, machine, kinds=kinds)


def _near_kinds(kinds: Sequence[ShardKind]) -> list[ShardKind]:
    """Kinds inside a host, of those that are allowed."""
    near: list[ShardKind] = [kind for kind in ("table", "column") if kind in kinds]
    if "row" in kinds or "table-row" in kinds:
        near.append("row")
    if not near:
        raise LayoutError(
            f"The tables of a tower lie on its host, and {', '.join(kinds)} puts them on all "
            "ranks. Allow table, row or column."
        )
    return near


def _deal(weights: Ints, hosts: int) -> list[int]:
    """The host of each tower: equally many to each, as even as can be."""
    each = len(weights) // hosts
    if each == 1:
        return list(range(hosts))
    placed = partition(weights, hosts, sizes=np.ones_like(weights), capacity=each)
    return [at // each for at in range(len(weights))] if placed is None else placed.tolist()


def _across_ps(towers: Sequence[TowerPlacement], machine: TableMachine) -> int:
    """What leaves a rank of a host for other hosts, and its gradients, in picoseconds."""
    out = sum(tower.vectors * wire_bytes(tower.width, machine.wire) for tower in towers)
    peers = machine.ranks // machine.per_host - 1
    return round(2 * machine.batch * peers * out / machine.link_bytes_per_s * PS_PER_S)
