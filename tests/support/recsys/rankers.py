"""A ranker of drawn weights, for servers that need no training."""

import numpy as np
import torch

from equipoise.recsys.models.catalog import build_model
from equipoise.recsys.rank.coding import Coding, NumberScale
from equipoise.recsys.rank.pooling import PooledTable
from equipoise.recsys.rank.ranker import Ranker
from equipoise.recsys.rank.scorer import Scorer
from equipoise.spec.architectures import Architecture
from equipoise.spec.recommend import RankModelSpec
from equipoise.spec.tables.table import TableSpec


def small_ranker(architecture: Architecture = "dlrm") -> Ranker:
    """Users, ads and words, and a price."""
    coding = Coding(
        ids=("user", "ad"),
        bags=("words",),
        words={
            "user": [f"u{at}" for at in range(20)],
            "ad": [str(at) for at in range(9)],
            "words": ["red", "green", "blue"],
        },
        numbers={"price": NumberScale(2.0, 0.5)},
    )
    source = np.random.default_rng(0)
    tables = []
    for name, words in coding.words.items():
        rows = source.standard_normal((len(words) + 1, 6)).astype(np.float32)
        spec = TableSpec(name, len(rows), 6, pooling="mean")
        tables.append(PooledTable(spec, torch.from_numpy(rows)))
    model = RankModelSpec(architecture=architecture, width=6, bottom=(5,), top=(9,))
    dense = build_model(model, [each.table for each in tables], 1, seed=1).eval()
    return Ranker("clicks", coding, Scorer(tables, dense), step=7, created=0)
