"""This rank's stages in a run: a packed step through its pipeline, and in its journal.

What it decides
    Nothing: ``sim.stages`` has the schedule. Each instruction is journaled with when it was
    to begin and how long it was to take, so that the report lays the two beside each other.

Kept true (tests/multi/train/test_pipeline.py)
    Trained weights equal those of one rank, with every schedule and beside every other axis.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.comm.group import Ranks
from equipoise.data.batch import make_batch
from equipoise.data.cache.store import TokenStore
from equipoise.nn.decoder import Decoder
from equipoise.nn.device.clock import make_marks
from equipoise.nn.modality.insert import Inserted
from equipoise.observe.journal import EventSink
from equipoise.parallel.pipeline.executor import PipelineOutcome, StageBatch
from equipoise.parallel.pipeline.part import DecoderPart, make_part
from equipoise.parallel.pipeline.pipeline import Pipeline
from equipoise.parallel.pipeline.slices import Slices
from equipoise.parallel.pipeline.timeline import write_spans
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.sim.stages import StagePlanner
from equipoise.spec.modality.encoder import ENCODERS
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.train.context import ContextGroup
from equipoise.train.health.own import OwnClock

InsertedOf = Callable[[int], Inserted | None]
"""Rows of images and sound of one of this rank's micro-batches."""


def read_losses(losses: Sequence[Tensor]) -> list[float]:
    """Scalars of a device on the host, all of them in one copy."""
    numbers: list[float] = torch.stack(list(losses)).tolist() if losses else []
    return numbers


def held_stages(sharing: ContextGroup, stages: StagePlanner) -> list[int]:
    """Stages of this rank."""
    held: list[int] = np.flatnonzero(stages.rank_of == sharing.mesh.coordinates["pp"]).tolist()
    return held


def cut_part(decoder: Decoder, sharing: ContextGroup, stages: StagePlanner) -> DecoderPart:
    """This rank's stages of a decoder that has its weights."""
    return DecoderPart(decoder, stages.split.edges.tolist(), held_stages(sharing, stages))


def initial_part(sharing: ContextGroup, stages: StagePlanner, seed: int) -> DecoderPart:
    """This rank's stages with initial weights; the others take no memory."""
    edges = stages.split.edges.tolist()
    return make_part(sharing.planner.model, edges, held_stages(sharing, stages), seed=seed)


@dataclass(frozen=True, slots=True, eq=False)
class PipelineRunner:
    """Runs packed steps through the pipeline of this rank."""

    pipeline: Pipeline
    stages: StagePlanner
    sharing: ContextGroup
    store: TokenStore
    ranks: Ranks
    journal: EventSink

    @classmethod
    def join(
        cls,
        model: ShardedDecoder,
        sharing: ContextGroup,
        stages: StagePlanner,
        store: TokenStore,
        ranks: Ranks,
        journal: EventSink,
        *,
        precision: str,
    ) -> "PipelineRunner":
        """Join the ranks of the pipeline; every rank does."""
        dtype = torch.bfloat16 if precision == "bf16" else None
        pipeline = Pipeline(model, sharing.mesh.peers("pp"), dtype=dtype)
        return cls(pipeline, stages, sharing, store, ranks, journal)

    def run(
        self,
        packed: PackedStep,
        step: int,
        labels: int,
        own: OwnClock,
        inserted_of: InsertedOf,
    ) -> tuple[list[float], float, float]:
        """Forward and backward of all micro-batches: their losses, busy and idle seconds.

        Idle is what passes between instructions. Losses are 0 but on the rank that has the last
        stage.
        """
        turns = self.sharing.turns(packed)
        with own.reading():
            batches = self._batches(packed, self.store, inserted_of)
        planned = self.stages.plan_rank(packed, self.sharing.data_rank)
        marks = make_marks(self.ranks.device)
        begin = marks.mark()
        is_lossy = self.sharing.planner.layout.skip > 0  # only by the run's own word
        run = self.pipeline.run(planned.schedule, batches, divisor=labels, allow_lossy=is_lossy)
        end = marks.mark()
        moments = marks.read()
        ran_s = float((run.timeline.end_ns - run.timeline.begin_ns).sum()) * 1e-9
        write_spans(self.journal, run.timeline, step=step, predicted=planned.timeline)
        idle_s = moments.passed_s(begin, end) - ran_s
        busy_s = moments.busy_s(begin, end) - (idle_s if moments.counts_idle else 0.0)
        return self._losses(run, len(turns)), busy_s, idle_s

    def evaluate(
        self, packed: PackedStep, store: TokenStore, inserted_of: InsertedOf
    ) -> list[float]:
        """Summed loss of each micro-batch, forward only; 0 but on the rank with the last stage."""
        batches = self._batches(packed, store, inserted_of)
        run = self.pipeline.evaluate(self.stages.rank_of, batches)
        return self._losses(run, len(batches))

    def _losses(self, run: PipelineOutcome, batches: int) -> list[float]:
        """The loss of each micro-batch, 0 where its last stage is elsewhere."""
        here = dict(zip(run.losses, read_losses(list(run.losses.values())), strict=True))
        return [here.get(at, 0.0) for at in range(batches)]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the other stages."""
        return self.sharing.mesh.peers("pp").group

    def counted(self, name: str) -> bool:
        """Whether a weight counts in the norm of this rank's.

        A tied table does on one of two; encoders, which every stage has, on the first.
        """
        part = self.pipeline.part
        if name.startswith(f"{ENCODERS}."):
            return part.holds_first
        return part.holds_first or not (part.model.tied and name == "embed.weight")

    def sum_gradients(self) -> None:
        """Sum gradients over replicas and tied tables, once after all micro-batches."""
        self.pipeline.sum_gradients(self.stages.rank_of)

    def _batches(
        self, packed: PackedStep, store: TokenStore, inserted_of: InsertedOf
    ) -> list[StageBatch]:
        turns = self.sharing.turns(packed)
        return [
            self._batch(store, packed, at, turn, inserted_of(at)) for at, turn in enumerate(turns)
        ]

    def _batch(
        self,
        store: TokenStore,
        packed: PackedStep,
        at: int,
        turn: MicroBatch,
        inserted: Inserted | None,
    ) -> StageBatch:
        batch = make_batch(store, turn, self.ranks.device)
        if turn.attends_from is not None:
            return StageBatch(batch.tokens_T, batch.labels_T, Slices.of(turn), inserted)
        share = self.sharing.share(packed, at, batch)
        return StageBatch(share.tokens_t, share.labels_t, share.pack, inserted)
