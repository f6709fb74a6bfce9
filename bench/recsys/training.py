"""DLRM on ML-100K split by time, in this process: what benches of recommenders train."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from equipoise.recsys.cache.foresight import expect_epoch
from equipoise.recsys.cache.packed import TablePrecision
from equipoise.recsys.embedding import ShardedTables
from equipoise.recsys.exchange import TableExchange
from equipoise.recsys.metrics import measure_auc, measure_entropy
from equipoise.recsys.models.dlrm import DLRM
from equipoise.recsys.optimizer import SparseStep
from equipoise.recsys.samples import Samples, read_samples
from equipoise.schedule.tables.placement import TablePlacement, TablePlan
from equipoise.spec.recommend import RecommendSpec, read_recommend
from equipoise.spec.tables.table import TableSpec

RECIPE = Path(__file__).parents[2] / "recipes" / "recommend" / "run.toml"


def recipe() -> tuple[RecommendSpec, Samples]:
    """The recipe's run and its samples, with sessions of each user's ratings."""
    spec, base = read_recommend(RECIPE, [("data.session", "user_id")])
    return spec, read_samples(spec.data, base)


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How a training ended."""

    auc: float
    entropy: float
    hits: float
    """Share of distinct rows that steps found in the caches."""


def train(
    spec: RecommendSpec,
    samples: Samples,
    *,
    seed: int,
    epochs: int,
    batch: int,
    step: SparseStep,
    shuffle: str = "samples",
    precision: TablePrecision | None = None,
) -> Ended:
    """Train and score the test split after the last epoch."""
    tables = [
        TableSpec(key, rows, spec.model.width, 1.0, spec.model.pooling)
        for key, rows in zip(samples.keys, samples.rows, strict=True)
    ]
    plan = TablePlan(tuple(TablePlacement(t, "table", (0,)) for t in tables), 1)
    held = ShardedTables(plan, TableExchange(alone=True), step, seed=seed, kept=precision)
    dense = DLRM(tables, samples.numbers.shape[1], seed=seed)
    adam = torch.optim.Adam(dense.parameters(), lr=spec.train.lr, weight_decay=1e-4)
    per_epoch = -(-samples.edges[1] // batch)
    for epoch in range(epochs):
        source = np.random.Generator(np.random.Philox(key=[seed, epoch]))
        order = samples.order(source, shuffle)
        if precision is not None and precision.policy == "trace":
            expect_epoch(held, samples, order, batch, epoch * per_epoch)
        for begin in range(0, len(order), batch):
            jagged, numbers, labels = samples.batch(order[begin : begin + batch])
            logits = dense(held(jagged), numbers)
            adam.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
            adam.step()
            held.step()
    begin, end = samples.bounds("test")
    with torch.no_grad():
        jagged, numbers, _ = samples.batch(np.arange(begin, end))
        logits = dense(held(jagged), numbers).double().numpy()
    labels = samples.labels[begin:end].astype(np.float64)
    caches = [shard.held for shard in held.held() if shard.held is not None]
    reads = sum(each.reads for each in caches)
    hits = sum(each.hits for each in caches) / reads if reads else 0.0
    return Ended(measure_auc(logits, labels), measure_entropy(logits, labels), hits)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation."""
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(np.mean(values)), "deviation": deviation}
