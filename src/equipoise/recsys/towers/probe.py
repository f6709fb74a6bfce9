"""Which columns belong in one tower: an epoch of the run without towers, then their likeness.

Why
    Which features interact is learned, not declared. Embeddings of a short run without towers say
    which columns point the same way for the same samples.

What it decides
    The likeness of two columns is the mean over samples of the size of the cosine between their
    pooled rows; an empty bag is like nothing. ``balance.tables.similar`` deals columns by it.

Kept true (tests/unit/cli/explain/test_towers.py)
    The answer depends on the run alone, and its line is a run.toml that trains.

Sources
    The tower partitioner of arXiv:2403.00877, section 3: features by their learned embeddings.
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from equipoise.balance.tables.similar import (
    TowerGoal,
    deal_features,
    draw_towers,
    measure_likeness,
)
from equipoise.balance.tables.towers import price_feature
from equipoise.base.arrays import Floats, Ints
from equipoise.observe.journal import EventSink
from equipoise.recsys.exchange import TimedExchange
from equipoise.recsys.place import describe_tables, plan_samples, run_machine
from equipoise.recsys.samples import Samples
from equipoise.recsys.trainer import RankTrainer
from equipoise.spec.recommend import RecommendSpec

_SEEN = 8192
"""Samples over which likeness is a mean."""
_DRAWS = 100


@dataclass(frozen=True, slots=True)
class TowerAdvice:
    """Columns in towers, beside random towers of equal load."""

    towers: tuple[tuple[str, ...], ...]
    loads: tuple[float, ...]
    """Each tower's lookups and exchange over the mean."""
    likeness: float
    """Mean likeness of a column to its tower, itself included."""
    random_likeness: tuple[float, ...]
    """That of each random draw."""


def without_towers(spec: RecommendSpec) -> RecommendSpec:
    """The run without towers, on one rank, with rows as fp32 in memory."""
    model = replace(spec.model, towers=(), tower_module="identity", tower_vectors=0, tower_width=0)
    tables = replace(spec.tables, precision="fp32", memory_mib=0.0)
    saves = replace(spec.checkpoint, every_steps=1 << 30)
    layout = replace(spec.layout, dp=1, ranks_per_host=0)
    return replace(spec, model=model, tables=tables, checkpoint=saves, layout=layout)


def measure_similarity(spec: RecommendSpec, samples: Samples) -> Floats:
    """Likeness of each two columns after an epoch, float64 [columns, columns]."""
    flat = without_towers(spec)
    plan = plan_samples(flat, samples).plan
    exchange = TimedExchange(alone=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = RankTrainer(Path(folder), flat, samples, plan, EventSink(), exchange)
        trainer.run(lambda _: None, stop_at=max(1, trainer.epoch_steps - 1))
        end = samples.edges[1]
        index = np.unique(np.linspace(0, end - 1, min(_SEEN, end)).astype(np.int64))
        with torch.no_grad():
            pooled = trainer.tables(samples.batch(index)[0])
        rows_BVW = pooled.view(len(index), -1, flat.model.width).double()
        unit = torch.nn.functional.normalize(rows_BVW, dim=2)
        return torch.bmm(unit, unit.transpose(1, 2)).abs().mean(dim=0).numpy()


def advise_towers(
    spec: RecommendSpec, samples: Samples, towers: int, goal: TowerGoal
) -> TowerAdvice:
    """Deal the columns of a run to towers.

    Raises:
        LayoutError: more towers than columns, or none.
    """
    tables, machine = describe_tables(spec, samples), run_machine(spec)
    sizes = spec.model.tower_sizes
    costs = np.array([price_feature(each, sizes, machine) for each in tables], dtype=np.int64)
    deal_features(np.eye(len(costs)), costs.tolist(), towers)  # refuses before anything is trained
    alike = measure_similarity(spec, samples)
    tower_of = deal_features(alike, costs.tolist(), towers, goal)
    source = np.random.Generator(np.random.Philox(key=spec.train.seed))
    drawn = [draw_towers(costs, towers, source) for _ in range(_DRAWS)]
    loads = np.bincount(tower_of, costs, towers)
    return TowerAdvice(
        name_towers(samples.keys, tower_of),
        tuple((loads / loads.mean()).tolist()),
        measure_likeness(alike, tower_of),
        tuple(measure_likeness(alike, each) for each in drawn),
    )


def name_towers(keys: tuple[str, ...], tower_of: Ints) -> tuple[tuple[str, ...], ...]:
    """The columns of each tower, in their order."""
    return tuple(
        tuple(key for key, own in zip(keys, tower_of.tolist(), strict=True) if own == tower)
        for tower in range(int(tower_of.max()) + 1)
    )
