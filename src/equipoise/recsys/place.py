"""Where a recommender's tables lie, and what its steps will send.

Kept true (tests/multi/recsys/test_train.py)
    Predicted ids and bytes are those that ranks measure.
"""

import numpy as np

from equipoise.balance.tables.plan import TableAnswer, plan_tables
from equipoise.balance.tables.price import TableMachine
from equipoise.base.arrays import Ints
from equipoise.recsys.samples import Samples
from equipoise.schedule.tables.placement import TablePlan
from equipoise.schedule.tables.traffic import count_traffic
from equipoise.spec.recommend import RecommendSpec
from equipoise.spec.tables.table import TableSpec

_MEMORY_BYTES_PER_S, _LINK_BYTES_PER_S = 1e10, 2e9
"""Assumed of a core and of gloo between two processes of one machine: only their ratio decides."""


def plan_samples(spec: RecommendSpec, samples: Samples) -> TableAnswer:
    """Place the tables of some samples by the lookups of their training part."""
    means = samples.ids_per_sample()
    tables = [
        TableSpec(key, rows, spec.model.width, means[key], spec.model.pooling)
        for key, rows in zip(samples.keys, samples.rows, strict=True)
    ]
    machine = TableMachine(
        spec.layout.dp,
        max(1, spec.train.batch // spec.layout.dp),
        _MEMORY_BYTES_PER_S,
        _LINK_BYTES_PER_S,
        _LINK_BYTES_PER_S,
        optimizer=spec.tables.optimizer,
        wire=spec.tables.wire,
    )
    return plan_tables(tables, machine, kinds=spec.tables.kinds, row_counts=samples.row_counts())


def predict_traffic(spec: RecommendSpec, samples: Samples, plan: TablePlan) -> dict[str, Ints]:
    """Bytes of a mean step, from each rank to each other, and ids that each rank looks up.

    Returns:
        ``bytes`` int64 [from, to]; ``ids`` int64 [ranks].
    """
    ranks, size = plan.ranks, spec.train.batch / plan.ranks
    train = samples.edges[1]
    ids: dict[str, Ints] = {}
    touched: dict[str, Ints] = {}
    looked_up = np.zeros(ranks)
    for each in plan.placements:
        counts = samples.row_counts()[each.table.name]
        row_map = each.row_map
        loads = [counts[row_map.rows_of(shard)].sum() for shard in range(row_map.shards)]
        per_rank = np.array(loads) * size / train
        ids[each.table.name] = np.rint(np.tile(per_rank, (ranks, 1))).astype(np.int64)
        samples_of = size if each.kind == "data" else size * ranks
        distinct = float((1 - (1 - np.minimum(1.0, counts / train)) ** samples_of).sum())
        count = ranks if each.kind == "data" else 1
        touched[each.table.name] = np.full(count, round(distinct), dtype=np.int64)
        if each.kind == "data":
            continue
        for shard, rank in enumerate(each.ranks):
            looked_up[rank] += per_rank[each.row_shard(shard)] * ranks
    wire = spec.tables.wire
    stages = count_traffic(
        plan,
        [round(size)] * ranks,
        ids,
        touched,
        forward=wire,
        backward=wire,
        is_row_wise=spec.tables.optimizer == "row-wise-adagrad",
    )
    total = np.sum(list(stages.values()), axis=0)
    return {"bytes": total, "ids": np.rint(looked_up).astype(np.int64)}
