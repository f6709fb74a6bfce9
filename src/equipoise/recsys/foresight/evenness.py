"""How evenly placements share the lookups of a run's own batches over its ranks.

Why
    A placement's promise is made from means. What ranks wait for is the slowest of them, batch
    by batch.

Kept true (tests/unit/recsys/foresight/test_evenness.py)
    Floats of all ranks add up to the batch's, under every placement.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from equipoise.balance.tables.plan import TableAnswer
from equipoise.base.arrays import Floats, Ints
from equipoise.cost.recommend import TableRates
from equipoise.recsys.place import plan_samples, predict_traffic
from equipoise.recsys.samples import Samples
from equipoise.recsys.trainer import draw_order
from equipoise.schedule.tables.placement import Buckets, TablePlacement, TablePlan
from equipoise.spec.recommend import RecommendSpec


@dataclass(frozen=True, slots=True)
class Evenness:
    """What one placement did to some batches."""

    name: str
    skew: float
    """Busiest rank over the mean, of floats that it looks up; mean over the batches."""
    worst_skew: float
    sent_bytes: int
    """What all ranks send in a mean step."""
    loads: tuple[float, ...]
    """Floats of each batch's ranks over their mean, busiest first; mean over the batches."""


def named_plans(
    spec: RecommendSpec, samples: Samples, answer: TableAnswer, rates: TableRates | None = None
) -> Mapping[str, TablePlan]:
    """The run's own plan, and what others do: by name; ``rates`` are those of the answer."""
    ranks = spec.layout.dp
    tables = [each.table for each in answer.plan.placements]
    by_cost = replace(spec, tables=replace(spec.tables, kinds=("table",)))
    order = sorted(tables, key=lambda table: (-table.weight_bytes, table.name))
    held, owner = [0] * ranks, {}
    for table in order:
        rank = held.index(min(held))
        owner[table.name] = rank
        held[rank] += table.weight_bytes
    storage = tuple(TablePlacement(table, "table", (owner[table.name],)) for table in tables)
    plans = {
        "planned": answer.plan,
        "whole, by cost": plan_samples(by_cost, samples, rates).plan,
        "whole, by storage": TablePlan(storage, ranks),
    }
    if ranks > 1:
        plans["rows, contiguous"] = _by_rows(answer.plan, "contiguous")
        plans["rows, modulo"] = _by_rows(answer.plan, "modulo")
    return plans


def _by_rows(plan: TablePlan, buckets: Buckets) -> TablePlan:
    every = tuple(range(plan.ranks))
    rows = (TablePlacement(each.table, "row", every, buckets) for each in plan.placements)
    return TablePlan(tuple(rows), plan.ranks)


def measure_evenness(
    name: str, plan: TablePlan, spec: RecommendSpec, samples: Samples, *, steps: int
) -> Evenness:
    """Deal the first batches of a run under a placement."""
    order = draw_order(spec, samples, 0)
    batch = min(spec.train.batch, len(order))
    steps = min(steps, len(order) // batch)
    skews, loads = [], []
    for step in range(steps):
        floats = deal(plan, samples, order[step * batch : (step + 1) * batch])
        mean = float(floats.mean())
        loads.append(np.sort(floats)[::-1] / (mean or 1.0))
        skews.append(float(loads[-1][0]) if mean else 1.0)
    sent = int(predict_traffic(spec, samples, plan)["bytes"].sum())
    even = tuple(np.mean(loads, axis=0).tolist())
    return Evenness(name, float(np.mean(skews)), max(skews), sent, even)


def deal(plan: TablePlan, samples: Samples, index: Ints) -> Floats:
    """Floats that each rank looks up for some samples, float64 [ranks]."""
    floats = np.zeros(plan.ranks)
    for each in plan.placements:
        at = samples.keys.index(each.table.name)
        offsets, ids = samples.offsets[at], samples.ids[at]
        if each.kind == "data":
            for rank in range(plan.ranks):
                own = index[rank * len(index) // plan.ranks : (rank + 1) * len(index) // plan.ranks]
                floats[rank] += (offsets[own + 1] - offsets[own]).sum() * each.table.width
            continue
        looked_up = np.concatenate([ids[offsets[i] : offsets[i + 1]] for i in index.tolist()])
        counts = np.bincount(looked_up, minlength=each.table.rows)
        for shard, rank in enumerate(each.ranks):
            begin, end = each.columns(shard)
            rows = each.row_map.rows_of(each.row_shard(shard))
            floats[rank] += counts[rows].sum() * (end - begin)
    return floats
