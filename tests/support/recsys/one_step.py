"""One step of a recommender on ranks or in one process: its loss and every gradient."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from equipoise.comm.group import Ranks
from equipoise.observe.journal import EventSink
from equipoise.recsys.exchange import TimedExchange
from equipoise.recsys.models.shards import gather_whole
from equipoise.recsys.place import plan_samples
from equipoise.recsys.samples import read_samples
from equipoise.recsys.trainer import RankTrainer
from equipoise.spec.recommend import RecommendSpec


@dataclass
class Step:
    """What one rank knows after its first step."""

    loss: float
    dense: dict[str, np.ndarray]
    """The gradient of each weight, summed over all ranks."""
    tables: list[tuple[str, np.ndarray, tuple[int, int], np.ndarray]]
    """This rank's parts of each table: name, rows, columns, and how SGD at rate 1 moved them."""
    sent: dict[str, int]
    """Bytes that it sent for a divided dense part, by stage."""
    held: int
    """Floats of the dense part's weights on this rank."""


def take_step(folder: Path, spec: RecommendSpec, base: Path, exchange: TimedExchange) -> Step:
    """The first step of a run whose tables are updated by plain SGD at rate 1."""
    torch.set_num_threads(1)
    samples = read_samples(spec.data, base)
    plan = plan_samples(spec, samples).plan
    trainer = RankTrainer(folder, spec, samples, plan, EventSink(), exchange)
    before = [shard.weight.clone() for shard in trainer.tables.held()]
    trained = trainer.run(lambda _: None, stop_at=1)
    grads_of = [*trainer.dense.parameters()]
    grads = gather_whole({n: each.grad for n, each in trainer.dense.named_parameters()})
    dense = {name: grad.numpy() for name, grad in grads.items()}
    moved = [
        (shard.table.name, shard.rows, shard.columns, (old - shard.weight).numpy())
        for shard, old in zip(trainer.tables.held(), before, strict=True)
    ]
    held = sum(e.to_local().numel() if isinstance(e, DTensor) else e.numel() for e in grads_of)
    return Step(trained.losses[0], dense, moved, trainer.dense_part.sent, held)


def take_steps(ranks: Ranks, folder: Path, specs: list[RecommendSpec], base: Path) -> list[Step]:
    """A rank's first step of each run."""
    del ranks
    return [take_step(folder, spec, base, TimedExchange()) for spec in specs]
