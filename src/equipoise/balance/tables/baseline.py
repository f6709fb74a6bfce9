"""Whole tables placed as others place them, at our prices: what a plan stands beside.

Kept true (tests/unit/balance/test_tables.py)
    By storage is the greedy that torchrec ships: tables by bytes, each to the rank of least load.

Sources
    torchrec, planner/partitioners.py: GreedyPerfPartitioner sorts by storage unless asked.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.tables.price import TableMachine, price_shard
from equipoise.base.arrays import Ints
from equipoise.spec.tables.table import TableSpec


@dataclass(frozen=True, eq=False)
class NamedLoads:
    """Each rank's load under one way to place tables."""

    name: str
    load_ps: Ints

    @property
    def skew(self) -> float:
        """The slowest rank over the mean."""
        mean = float(self.load_ps.mean())
        return float(self.load_ps.max()) / mean if mean else 1.0


def load_baselines(tables: Sequence[TableSpec], machine: TableMachine) -> list[NamedLoads]:
    """Whole tables dealt round, and by storage; neither looks at memory."""
    weights = [price_shard(table, machine).total_ps for table in tables]
    around = np.zeros(machine.ranks, dtype=np.int64)
    np.add.at(around, np.arange(len(tables)) % machine.ranks, weights)
    order = sorted(range(len(tables)), key=lambda i: (-tables[i].weight_bytes, i))
    return [
        NamedLoads("dealt round", around),
        NamedLoads("by storage (torchrec's greedy)", _greedy(weights, order, machine.ranks)),
    ]


def _greedy(weights: Sequence[int], order: Sequence[int], ranks: int) -> Ints:
    heap = [(0, rank) for rank in range(ranks)]
    loads = np.zeros(ranks, dtype=np.int64)
    for index in order:
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + weights[index], rank))
        loads[rank] += weights[index]
    return loads
