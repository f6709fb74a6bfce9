"""One run with and without steps that work for those after them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.comm.group import Ranks
from equipoise.observe.event import Kind
from equipoise.observe.journal import EventSink
from equipoise.recsys.exchange import TableSwap, TimedExchange
from equipoise.recsys.folder import prepare
from equipoise.recsys.place import plan_samples
from equipoise.recsys.rank.coding import write_coding
from equipoise.recsys.samples import read_samples
from equipoise.recsys.trainer import RankTrainer
from equipoise.spec.recommend import RecommendSpec


class _Noted(TimedExchange):
    """Notes the order in which exchanges begin and are awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def begin(self, stage: str, blocks: Sequence[Tensor], expected: Sequence[int]) -> TableSwap:
        self.order.append(stage)
        return super().begin(stage, blocks, expected)

    def end(self, under_way: TableSwap) -> list[Tensor]:
        if under_way.stage == "ids":
            self.order.append("has ids")
        return super().end(under_way)


class _Kept(EventSink):
    """Keeps the events of steps."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def write(self, kind: Kind, name: str, *, t: float | None = None, **fields: Any) -> None:
        del kind, t
        if name == "recommend":
            self.steps.append(fields)


@dataclass
class Trained:
    """How a run went on one rank."""

    losses: list[float]
    best: Any
    arrays: dict[str, np.ndarray]
    logits: np.ndarray
    """Those of the test split."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)


def train_both(
    ranks: Ranks, folder: Path, specs: Sequence[RecommendSpec], base: Path
) -> list[tuple[Trained, Trained]]:
    """Each run with early steps, stopped after 9 steps and gone on; and without, in one go."""
    torch.set_num_threads(1)
    samples = read_samples(specs[0].data, base)
    both = []
    for number, spec in enumerate(specs):
        sides = []
        for is_early in (True, False):
            own = folder / f"{number}-{is_early}"
            if ranks.rank == 0:
                prepare(own, spec, base)
                write_coding(own, samples.coding)
            ranks.barrier()
            plan, sink, exchange = plan_samples(spec, samples).plan, _Kept(), _Noted()
            for stop_at in (9, None) if is_early else (None,):
                trainer = RankTrainer(own, spec, samples, plan, sink, exchange, is_early=is_early)
                trainer.resume()
                trained = trainer.run(lambda _: None, stop_at)
            arrays = {
                f"{shard.table.name}:{shard.index}:{key}": value
                for shard in trainer.tables.held()
                for key, value in shard.arrays().items()
            }
            arrays |= {key: each.numpy() for key, each in trainer.dense.state_dict().items()}
            logits = trainer.logits(np.arange(*samples.bounds("test")))
            sides.append(
                Trained(trained.losses, trained.best, arrays, logits, sink.steps, exchange.order)
            )
        both.append((sides[0], sides[1]))
    return both
