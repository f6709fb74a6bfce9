"""Predicted hits are those of a rank that reads its own samples' rows and updates everybody's."""

import numpy as np
import pytest
import torch

from equipoise.recsys.cache.foresight import caches_of, predict_hits
from equipoise.recsys.cache.packed import TablePrecision
from equipoise.recsys.embedding import ShardedTables
from equipoise.recsys.exchange import TableExchange
from equipoise.recsys.optimizer import SparseStep
from equipoise.recsys.samples import make_samples
from equipoise.schedule.tables.placement import TablePlacement, TablePlan
from equipoise.spec.recommend import ColumnsSpec
from equipoise.spec.tables.table import TableSpec


@pytest.mark.parametrize("rank", [0, 1])
def test_a_copy_is_read_by_its_own_rank_alone(rank: int) -> None:
    source = np.random.default_rng(3)
    users = (30 * source.random(200) ** 2).astype(np.int64)
    columns = {"user": users, "click": source.integers(0, 2, 200)}
    samples = make_samples(columns, ColumnsSpec(label="click", ids=("user",)), "x.csv")
    exchange, step = TableExchange(alone=True), SparseStep("sgd", lr=1.0)
    exchange.rank, exchange.ranks = rank, 2
    table = TableSpec("user", samples.rows[0], 4)
    plan = TablePlan((TablePlacement(table, "data", (0, 1)),), ranks=2)
    tables = ShardedTables(plan, exchange, step, kept=TablePrecision("int8", cache_share=0.4))
    order, (copy,) = np.arange(150), tables.copies
    predicted = predict_hits(caches_of(tables), rank, 2, samples, [order], 20, range(8))
    assert copy.held is not None
    for number in range(8):
        index = order[20 * number : 20 * number + 20]
        own = index[rank * len(index) // 2 : (rank + 1) * len(index) // 2]
        copy.pool(*reversed(samples.batch(own)[0].bags("user")), is_training=True)
        rows = torch.unique(samples.batch(index)[0].values)
        copy.apply(step, rows, torch.ones(len(rows), 4), number=number + 1)
    assert 0 < copy.held.hits < copy.held.reads
    assert predicted == {"user": (copy.held.hits, copy.held.reads)}
