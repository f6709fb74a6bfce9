"""Small tables under every plan, trained on ranks and in one process."""

from dataclasses import dataclass

import numpy as np
import torch

from equipoise.comm.group import Ranks
from equipoise.recsys.embedding import ShardedTables, resident_rows, whole_table
from equipoise.recsys.exchange import TableExchange
from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.optimizer import SparseStep
from equipoise.schedule.tables.placement import TablePlacement, TablePlan
from equipoise.spec.tables.table import TableSpec

TABLES = (
    TableSpec("user", 37, 6, 3.0),
    TableSpec("item", 11, 5, 2.0, "mean"),
    TableSpec("hour", 3, 4, 1.0),
)
HeldRows = dict[str, list[tuple[np.ndarray, tuple[int, int], np.ndarray]]]
"""Rows, columns and weights of shards, by table."""
STEPS = 4
WIDTH = sum(table.width for table in TABLES)


def plans(ranks: int) -> dict[str, TablePlan]:
    """A plan of each kind, and one of all kinds, on some ranks; hosts of two."""
    every = tuple(range(ranks))
    source = np.random.default_rng(0)

    def whole(kind: str, *, given: tuple[int, ...] = every, **more: object) -> TablePlan:
        return TablePlan(
            tuple(
                TablePlacement(table, kind, given[: min(len(given), table.width)], **more)
                if kind == "column"
                else TablePlacement(table, kind, given, **more)
                for table in TABLES
            ),
            ranks,
        )

    by_cost = tuple(
        TablePlacement(table, "row", every, "by-cost", source.integers(0, ranks, table.rows))
        for table in TABLES
    )
    last = ranks - 1
    mixed = (
        TablePlacement(TABLES[0], "table-row", every[-2:], "modulo"),
        TablePlacement(TABLES[1], "column", (last, 0, last), edges=(0, 1, 4, 5)),
        TablePlacement(TABLES[2], "data", every),
    )
    return {
        "table": TablePlan(
            tuple(
                TablePlacement(table, "table", (place % ranks,))
                for place, table in enumerate(TABLES)
            ),
            ranks,
        ),
        "one": TablePlan(tuple(TablePlacement(t, "table", (last,)) for t in TABLES), ranks),
        "row": whole("row"),
        "modulo": whole("row", buckets="modulo", given=every[::-1]),
        "by-cost": TablePlan(by_cost, ranks),
        "column": whole("column"),
        "data": whole("data"),
        "table-row": TablePlan(
            tuple(TablePlacement(table, "table-row", every[:2]) for table in TABLES), ranks, 2
        ),
        "mixed": TablePlan(mixed, ranks, 2),
    }


def batch(step: int, rank: int) -> KeyedJagged:
    """Samples of a rank: uneven sizes, empty bags, duplicates; all ids low; a rank with none."""
    source = np.random.default_rng([step, rank])
    samples = (3 + 2 * rank, 4, 0 if rank == 1 else 5, 6)[step]
    bags: dict[str, list[list[int]]] = {}
    for table in TABLES:
        rows = 2 if step == 1 else table.rows
        counts = source.integers(0, 5, samples)
        bags[table.name] = [source.integers(0, rows, count).tolist() for count in counts]
        if step == 3:
            bags[table.name] = [[1, 1, *bag, 1] for bag in bags[table.name]]
    return KeyedJagged.from_bags(bags)


def joined(batches: list[KeyedJagged]) -> KeyedJagged:
    """The batches of all ranks as one."""
    bags: dict[str, list[list[int]]] = {name: [] for name in batches[0].keys}
    for each in batches:
        for name, rows in bags.items():
            lengths, values = each.bags(name)
            rows += [part.tolist() for part in values.split(lengths.tolist())]
    return KeyedJagged.from_bags(bags)


def held_rows(tables: ShardedTables) -> HeldRows:
    """What a process holds of each table."""
    held: HeldRows = {}
    for shard in tables.held():
        row = (shard.rows, shard.columns, shard.weight.numpy().copy())
        held.setdefault(shard.table.name, []).append(row)
    return held


@dataclass
class Outcome:
    """One process's part of a trained set of tables."""

    shards: HeldRows
    sent: list[dict[str, np.ndarray]]
    resident: dict[str, int]
    outs: list[np.ndarray]


def train(
    tables: ShardedTables, batches: list[KeyedJagged], counts: list[int], lr_of: float | None = None
) -> Outcome:
    """Some steps on a loss that is not linear in the rows."""
    mix = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    sent, outs = [], []
    for each, count in zip(batches, counts, strict=True):
        tables.exchange.clear()
        out = tables(each)
        outs.append(out.detach().numpy().copy())
        loss = ((out * mix - 0.3) ** 2).sum() / count
        loss.backward()
        tables.step(lr_of)
        sent.append(dict(tables.exchange.sent))
    return Outcome(held_rows(tables), sent, resident_rows(tables), outs)


def counts_of(ranks: int) -> list[int]:
    return [sum(batch(step, rank).samples for rank in range(ranks)) for step in range(STEPS)]


def train_plans(ranks: Ranks, cases: list[tuple[TablePlan, SparseStep, str]]) -> list[Outcome]:
    """Each case on these ranks; the last word is the wire's format both ways."""
    torch.set_num_threads(1)
    batches = [batch(step, ranks.rank) for step in range(STEPS)]
    return [
        train(
            ShardedTables(plan, TableExchange(), step, seed=3, forward=wire, backward=wire),
            batches,
            counts_of(ranks.world),
        )
        for plan, step, wire in cases
    ]


def train_alone(ranks: int, step: SparseStep) -> Outcome:
    """The batches of some ranks in this process."""
    plan = TablePlan(tuple(TablePlacement(table, "table", (0,)) for table in TABLES), 1)
    tables = ShardedTables(plan, TableExchange(alone=True), step, seed=3)
    batches = [joined([batch(s, rank) for rank in range(ranks)]) for s in range(STEPS)]
    return train(tables, batches, counts_of(ranks))


def tables_of(outcomes: list[Outcome]) -> dict[str, np.ndarray]:
    """Whole tables from the shards of all ranks."""
    return {
        table.name: whole_table(
            [part for each in outcomes for part in each.shards.get(table.name, [])], table.rows
        )
        for table in TABLES
    }
