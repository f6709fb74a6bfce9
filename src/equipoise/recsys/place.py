"""Where a recommender's tables lie, and what its steps will send.

Kept true (tests/multi/recsys/test_train.py)
    Predicted ids and bytes are those that ranks measure.
"""

import numpy as np

from equipoise.balance.tables.plan import TableAnswer, plan_tables
from equipoise.balance.tables.price import TableMachine
from equipoise.balance.tables.towers import plan_towers
from equipoise.base.arrays import Ints
from equipoise.cost.recommend import TableRates
from equipoise.recsys.samples import Samples
from equipoise.recsys.sessions.sharing import predict_loads
from equipoise.schedule.tables.placement import TablePlan
from equipoise.schedule.tables.traffic import count_traffic
from equipoise.spec.recommend import RecommendSpec
from equipoise.spec.tables.table import TableSpec


def describe_tables(spec: RecommendSpec, samples: Samples) -> list[TableSpec]:
    """The tables of some samples, with the ids of their training part."""
    means, model = samples.ids_per_sample(), spec.model
    return [
        TableSpec(key, rows, model.width, means[key], model.pooling)
        for key, rows in zip(samples.keys, samples.rows, strict=True)
    ]


def run_machine(spec: RecommendSpec, rates: TableRates | None = None) -> TableMachine:
    """The ranks of a run, as plans of its tables take them; rates are assumed unless given."""
    known = rates or TableRates()
    return TableMachine(
        spec.layout.dp,
        max(1, spec.train.batch // spec.layout.dp),
        known.memory_bytes_per_s,
        known.link_bytes_per_s,
        known.link_bytes_per_s,
        spec.layout.ranks_per_host,
        optimizer=spec.tables.optimizer,
        wire=spec.tables.wire,
        shard_s=known.shard_s,
    )


def plan_samples(
    spec: RecommendSpec, samples: Samples, rates: TableRates | None = None
) -> TableAnswer:
    """Place the tables of some samples by the lookups of their training part.

    Args:
        spec: The run.
        samples: Its samples.
        rates: Of the machine; assumed unless given.
    """
    tables, machine, model = describe_tables(spec, samples), run_machine(spec, rates), spec.model
    kinds = [k for k in spec.tables.kinds if spec.tables.precision == "fp32" or k != "column"]
    counts = samples.row_counts()
    if model.towers:
        sizes = model.tower_sizes
        return plan_towers(tables, model.towers, sizes, machine, kinds=kinds, row_counts=counts)
    return plan_tables(tables, machine, kinds=kinds, row_counts=counts)


def predict_traffic(spec: RecommendSpec, samples: Samples, plan: TablePlan) -> dict[str, Ints]:
    """Bytes of a mean step, from each rank to each other, and ids that each rank looks up.

    Returns:
        ``bytes`` int64 [from, to]; ``ids`` int64 [ranks].
    """
    ranks = plan.ranks
    loads = predict_loads(spec, samples, ranks)
    ids: dict[str, Ints] = {}
    touched: dict[str, Ints] = {}
    looked_up = np.zeros(ranks)
    for each in plan.placements:
        lookups, row_map = loads.lookups[each.table.name], each.row_map
        of_shard = [lookups[row_map.rows_of(shard)].sum() for shard in range(row_map.shards)]
        per_rank = np.array(of_shard) / ranks
        ids[each.table.name] = np.rint(np.tile(per_rank, (ranks, 1))).astype(np.int64)
        of_rank, of_all = loads.distinct[each.table.name]
        count, distinct = (ranks, of_rank) if each.kind == "data" else (1, of_all)
        touched[each.table.name] = np.full(count, round(distinct), dtype=np.int64)
        if each.kind == "data":
            continue
        for shard, rank in enumerate(each.ranks):
            looked_up[rank] += per_rank[each.row_shard(shard)] * ranks
    wire = spec.tables.wire
    stages = count_traffic(
        plan,
        {name: [round(size)] * ranks for name, size in loads.sizes.items()},
        ids,
        touched,
        forward=wire,
        backward=wire,
        is_row_wise=spec.tables.optimizer == "row-wise-adagrad",
        groups=loads.groups,
    )
    total = np.sum(list(stages.values()), axis=0)
    return {"bytes": total, "ids": np.rint(looked_up).astype(np.int64)}
