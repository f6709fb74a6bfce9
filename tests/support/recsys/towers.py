"""Small tables in towers on hosts of some ranks, and the same plans without towers."""

from dataclasses import dataclass

import numpy as np
import torch

from equipoise.comm.group import Ranks
from equipoise.recsys.embedding import ShardedTables
from equipoise.recsys.exchange import TableExchange
from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.optimizer import SparseStep
from equipoise.recsys.towers.tables import TowerTables
from equipoise.schedule.tables.placement import TablePlacement, TablePlan, TowerPlacement
from equipoise.schedule.tables.traffic import Wire
from equipoise.spec.tables.table import TableSpec
from equipoise.spec.towers import TowerSizes
from support.recsys.tables import HeldRows, held_rows, joined

W = 6
TABLES = (
    TableSpec("user", 23, W, 3.0, "mean"),
    TableSpec("item", 11, W, 2.0),
    TableSpec("hour", 5, W, 1.0, "mean"),
    TableSpec("words", 17, W, 2.0, "mean"),
)
TOWERS = (("words", "user"), ("item", "hour"))
MODULES = {
    "identity": TowerSizes("identity", W, 0, 0, 2),
    "narrow": TowerSizes("linear", W, 0, 3, 2),
    "fewer": TowerSizes("linear", W, 1, 0, 2),
    "both": TowerSizes("linear", W, 1, 4, 2),
    "cross": TowerSizes("cross", W, 1, 3, 2),
}
STEPS = 3
STEP = SparseStep("sgd", lr=0.1)


def towers_on(hosts: int, sizes: TowerSizes) -> tuple[TowerPlacement, ...]:
    return tuple(
        TowerPlacement(
            names, at * hosts // len(TOWERS), *sizes.leaving(2), weights=sizes.count_weights(2)
        )
        for at, names in enumerate(TOWERS)
    )


def plan(ranks: int, per_host: int, sizes: TowerSizes | None) -> TablePlan:
    """Tables whole, by columns and by rows on the hosts of their towers; without, None."""
    hosts = ranks // per_host
    chosen = towers_on(hosts, sizes or MODULES["identity"])
    placements = []
    for place, table in enumerate(TABLES):
        first = next(t.host for t in chosen if table.name in t.tables) * per_host
        host = tuple(range(first, first + per_host))
        kind = ("table-row", "column", "table", "table")[place]
        given = {"table": (host[place % per_host],), "column": (host[-1], host[0], host[-1])}
        buckets = "modulo" if kind == "table-row" else "contiguous"
        placements.append(TablePlacement(table, kind, given.get(kind, host), buckets))
    return TablePlan(tuple(placements), ranks, per_host, () if sizes is None else chosen)


def batch(step: int, rank: int) -> KeyedJagged:
    """Samples of a rank: uneven sizes, empty bags, duplicates; a rank without samples."""
    source = np.random.default_rng([step, rank])
    samples = (3 + rank, 4, 0 if rank == 1 else 5)[step]
    return KeyedJagged.from_bags(
        {
            table.name: [
                source.integers(0, table.rows, count).tolist()
                for count in source.integers(0, 4, samples)
            ]
            for table in TABLES
        }
    )


@dataclass
class Outcome:
    """What one process saw, step after step."""

    outs: list[np.ndarray]
    sent: list[dict[str, np.ndarray]]
    modules: list[dict[tuple[int, str], np.ndarray]]
    """Gradients of module weights, by tower and name."""
    rows: HeldRows


def train(tables: ShardedTables, batches: list[KeyedJagged], counts: list[int]) -> Outcome:
    """Some steps on a loss that is not linear in what leaves the towers."""
    mix = torch.randn(tables.width, generator=torch.Generator().manual_seed(1))
    result = Outcome([], [], [], {})
    for each, count in zip(batches, counts, strict=True):
        tables.exchange.clear()
        out = tables(each)
        result.outs.append(out.detach().numpy().copy())
        (((out * mix - 0.3) ** 2).sum() / count).backward()
        tables.step()
        result.sent.append(dict(tables.exchange.sent))
        if isinstance(tables, TowerTables):
            result.modules.append(
                {
                    (at, name): weight.grad.numpy().copy()
                    for at, tower in tables.towers.items()
                    for name, weight in tower.module.named_parameters()
                }
            )
    result.rows = held_rows(tables)
    return result


def make(
    given: TablePlan, exchange: TableExchange, sizes: TowerSizes | None, wire: Wire = "fp32"
) -> ShardedTables:
    if sizes is None:
        return ShardedTables(given, exchange, STEP, seed=3)
    return TowerTables(given, exchange, STEP, sizes, seed=3, lr=0.01, forward=wire, backward=wire)


def counts_of(ranks: int) -> list[int]:
    return [sum(batch(step, rank).samples for rank in range(ranks)) for step in range(STEPS)]


def train_on_ranks(
    ranks: Ranks, cases: list[tuple[TablePlan, TowerSizes | None, Wire]]
) -> list[Outcome]:
    torch.set_num_threads(1)
    batches = [batch(step, ranks.rank) for step in range(STEPS)]
    counts = counts_of(ranks.world)
    return [
        train(make(given, TableExchange(), sizes, wire), batches, counts)
        for given, sizes, wire in cases
    ]


def train_alone(ranks: int, sizes: TowerSizes | None) -> Outcome:
    """The batches of some ranks in this process."""
    batches = [joined([batch(step, rank) for rank in range(ranks)]) for step in range(STEPS)]
    tables = make(plan(1, 1, sizes), TableExchange(alone=True), sizes)
    return train(tables, batches, counts_of(ranks))
