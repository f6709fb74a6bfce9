"""One optimizer step on one rank: the pack's micro-batches, the sum, the update.

Why
    The loss is the sum over all tokens everywhere divided by one integer count of labels
    that is known before the first micro-batch. No rank averages; so every layout and every
    packing of the same pieces has the same gradient.

What it decides
    Nothing. The pack says what to compute; this measures how long it took.

    ::

        rank 0  | micro-batch | micro-batch | wait | reduce | optimizer |
        rank 1  | micro-batch | micro-batch        | reduce | optimizer |
                                            ^ losses, digests and times are exchanged here
                | gradients ...                             | ... run   |

    ``equipoise check`` calls ``gradients``, as ``run`` does, and compares what it left.
    On an accelerator the host waits for the device at the ends of these blocks alone: after the
    last micro-batch, in the exchange, for the norm, and when the weights are updated. Within
    micro-batches it only launches, but for what ``docs/train/accelerators.md`` lists.

    Ranks that share a micro-batch run it at the same time, each its own tokens. Waiting is the
    meeting of all ranks, and in a pipeline what passes between instructions. Time in which
    another program has the core is neither waiting nor busy.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from equipoise.comm.group import Ranks
from equipoise.data.batch import Batch, count_labels, make_batch
from equipoise.data.cache.store import TokenStore
from equipoise.nn.decoder import Decoder
from equipoise.nn.device.clock import await_device, make_marks
from equipoise.nn.modality.insert import Inserted
from equipoise.nn.moe.balance import forget_loads, set_loss_scale
from equipoise.observe.journal import EventSink
from equipoise.observe.machine import run_delay_s
from equipoise.optim.adamw import clip, global_norm
from equipoise.parallel.expert.loads import ExpertLoads, step_loads
from equipoise.parallel.overlap.sites import take_parted
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.train.context import ContextGroup, whole
from equipoise.train.health.agree import agree, meet
from equipoise.train.health.finite import blame_step
from equipoise.train.health.own import OwnClock, OwnParts
from equipoise.train.health.state import StateWatch
from equipoise.train.modality.runner import EncoderLoads, ModalityRunner
from equipoise.train.pipeline import PipelineRunner, read_losses
from equipoise.train.spans import DeviceSpans
from equipoise.train.together import Partners


@dataclass(frozen=True, slots=True)
class Gradients:
    """A step up to its gradients, which are in the decoder: summed, and split as ZeRO says."""

    labels: int
    """What the loss was divided by; without any, by 1."""
    loss: float
    """Mean over all labels of all ranks."""
    norm: float
    """Norm of the gradients of all ranks, each weight counted once."""
    losses: list[float]
    """Summed loss of each of this rank's micro-batches."""
    rows: torch.Tensor
    """What ranks exchanged, float64 [ranks, 11]; columns as ``agree.meet`` lists them."""
    wait_s: float
    """What this rank waited."""
    run_delay_s: float
    """What other programs kept this rank from a core; NaN where the system does not say."""
    encoders: EncoderLoads | None
    """What encoded images and sound, if a run has any."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Measurements of one step. Per-rank arrays are indexed by rank."""

    labels: int
    """Tokens that were learned, of all ranks."""
    loss: float
    grad_norm: float
    step_s: float
    rank_busy_s: list[float]
    wait_s: float
    """What this rank waited."""
    run_delay_s: float
    """As in ``Gradients``."""
    computed_s: float
    """Until the last rank had computed: its busy time, or its pipeline from end to end."""
    stop: bool
    words: list[int]
    """What each rank had to tell the others."""
    experts: ExpertLoads | None
    parted: dict[int, int]
    """Forward passes of sites where rows may travel in parts, by the number of parts."""
    rank_own: list[OwnParts]
    """What each rank spent itself before all met."""
    encoders: EncoderLoads | None

    def describe(self, step: int) -> list[str]:
        """Sentences on what is not as one would expect."""
        if self.labels:
            return []
        return [f"Step {step} has no token to learn; no weight was changed."]


@dataclass(frozen=True, slots=True)
class StepRunner:
    """Runs packed steps of one model on one rank."""

    model: ShardedDecoder
    optimizer: torch.optim.Optimizer
    store: TokenStore
    ranks: Ranks
    journal: EventSink
    sharing: ContextGroup | Partners | None = None
    """The ranks that share this one's micro-batches or documents, if it is not alone."""
    pipeline: PipelineRunner | None = None
    """Its stages, if others have the rest of the layers."""
    state: StateWatch | None = None
    """Watches weights and moments, where a run does."""
    own: OwnClock = field(default_factory=lambda: OwnClock(()))
    """What this rank spends itself."""
    modality: ModalityRunner | None = None  # where a run has images or sound

    def run(
        self,
        packed: PackedStep,
        *,
        step: int,
        rate: float,
        clip_norm: float,
        last_good: Callable[[], Path | None],
        stop_asked: bool,
        word: int = 0,
    ) -> StepResult:
        """``gradients``, then clip and update; a step without a label leaves every weight alone.

        Args:
            packed: The decision, equal on all ranks.
            step: Number of the step, from 1.
            rate: Learning rate of this step.
            clip_norm: Largest global gradient norm.
            last_good: Finds the checkpoint to name when a loss is not a number.
            stop_asked: This rank was asked to stop; becomes everybody's knowledge.
            word: Whatever else this rank has to tell the others.

        Raises:
            NonFiniteError: a loss or the gradient norm is not finite. No weight was changed.
            LayoutError: ranks packed differently.
        """
        started = time.perf_counter()
        made = self.compute(
            packed, step=step, last_good=last_good, stop_asked=stop_asked, word=word
        )
        experts = self.update(made, step=step, rate=rate, clip_norm=clip_norm)
        return self.result(made, experts, step_s=time.perf_counter() - started)

    def compute(
        self,
        packed: PackedStep,
        *,
        step: int,
        last_good: Callable[[], Path | None],
        stop_asked: bool,
        word: int,
    ) -> Gradients:
        """``gradients`` that are finite; arguments and errors are those of ``run``."""
        made = self.gradients(packed, step=step, stop_asked=stop_asked, word=word)
        changed = [] if self.state is None else self.state.changed_parts()
        norms, changes = self.ranks.gather_floats([made.norm, len(changed)]).sum(0).tolist()
        if self.state is not None:
            is_bad = not np.isfinite([made.loss, norms]).all()
            self.state.require_right(step, changed, is_any=changes > 0, is_doubtful=bool(is_bad))
        # A replica's own gradient may be bad on one rank alone: all ranks end the step, or none.
        for what, value in (("loss", made.loss), ("gradient norm", norms)):
            if not np.isfinite(value):
                raise blame_step(
                    f"{what} of step {step}",
                    list(zip(self._turns(packed), made.losses, strict=True)),
                    decoder=self.model.decoder,
                    run_again=partial(self.evaluate, packed, self.store),
                    store=self.store,
                    ranks=self.ranks,
                    journal=self.journal,
                    step=step,
                    last_good=last_good(),
                )
        return made

    def update(
        self, made: Gradients, *, step: int, rate: float, clip_norm: float
    ) -> ExpertLoads | None:
        """Clip the decoder's gradients, update its weights and drop the gradients."""
        with self.journal.span("optimizer", step=step):
            clip(self.model.decoder, made.norm, clip_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            if made.labels:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            experts = step_loads(self.model.decoder, self.ranks, step=step, labels=made.labels)
            if experts is not None and self.model.tiers is not None:
                experts = dataclasses.replace(experts, file=self.model.tiers.take())
            await_device(self.ranks.device)
            if self.state is not None:
                self.state.updated()
            return experts

    def drop(self) -> None:
        """Forget the decoder's gradients and what its routers counted."""
        self.optimizer.zero_grad(set_to_none=True)
        forget_loads(self.model.decoder)

    def beside(self, journal: EventSink, sharing: ContextGroup | Partners) -> "StepRunner":
        """What runs steps of the same decoder among these ranks, journaled elsewhere."""
        pipeline = self.pipeline
        if pipeline is not None:
            pipeline = dataclasses.replace(pipeline, journal=journal)
        return dataclasses.replace(self, journal=journal, sharing=sharing, pipeline=pipeline)

    def result(self, made: Gradients, experts: ExpertLoads | None, *, step_s: float) -> StepResult:
        """What a step measured."""
        rows = made.rows
        decoder = self.model.decoder
        return StepResult(
            labels=made.labels,
            loss=made.loss,
            grad_norm=made.norm,
            step_s=step_s,
            rank_busy_s=rows[:, 2].tolist(),
            wait_s=made.wait_s,
            run_delay_s=made.run_delay_s,
            computed_s=float(rows[:, 2 if self.pipeline is None else 4].max()),
            stop=bool(rows[:, 3].any()),
            words=rows[:, 5].to(torch.int64).tolist(),
            experts=experts,
            parted=take_parted(decoder) if isinstance(decoder, Decoder) else {},
            rank_own=[OwnParts(*row) for row in rows[:, 6:].tolist()],
            encoders=made.encoders,
        )

    def gradients(
        self, packed: PackedStep, *, step: int, stop_asked: bool = False, word: int = 0
    ) -> Gradients:
        """Compute, meet, reduce: everything before the optimizer, which is left untouched.

        Gradients are added to those that the decoder has. ``check`` calls this, so what it proves
        is what trains.

        Args:
            packed: The decision, equal on all ranks.
            step: Number of the step, from 1.
            stop_asked: As for ``run``.
            word: Likewise.

        Raises:
            LayoutError: ranks packed differently.
        """
        started, delay_s = time.perf_counter(), run_delay_s()
        met_s = agree(packed, step, self.ranks, self.journal) if self._exchanges else 0.0
        if self.modality is not None:
            self.modality.begin(packed, step, self.store)
        begun = self.own.begin()
        labels = sum(int(count_labels(batch.pieces, self.store).sum()) for batch in packed)
        divisor = max(1, labels)
        set_loss_scale(self.model.decoder, 1 / divisor)
        losses, busy_s, idle_s = self._compute(packed, step, divisor)
        computed_s = time.perf_counter() - started
        own = self.own.take(begun, busy_s)
        told = [busy_s, float(stop_asked), computed_s, float(word), *dataclasses.astuple(own)]
        loss = sum(losses) if self._counts_loss else 0.0
        rows, waited_s = meet(packed, step, [loss, *told], self.ranks, self.journal)
        met = self.own.now()
        encoders = None if self.modality is None else self.modality.finish(step)
        with self.journal.span("reduce", step=step):
            self._sum_gradients()
            norm = float(self._norm())  # waits for the device, which the span is about
        self.own.exchanged(met)
        loss = float(rows[:, 1].sum()) / divisor
        waited_s += idle_s + met_s
        late_s = run_delay_s() - delay_s
        return Gradients(labels, loss, norm, losses, rows, waited_s, late_s, encoders)

    @torch.no_grad()
    def evaluate(self, packed: PackedStep, store: TokenStore) -> float:
        """Summed loss of this rank's micro-batches of other documents, forward only.

        Gathered weights stay until ``model.free_gathered``.

        Args:
            packed: The micro-batches, equal on all ranks; as many on each where ranks meet in them.
            store: The documents.

        Returns:
            What this rank adds to the sum over all ranks; 0 where another one counts it.
        """
        if self.modality is not None:
            self.modality.begin(packed, 0, store)
        if self.pipeline is not None:
            losses = self.pipeline.evaluate(packed, store, self._inserted)
        else:
            losses = read_losses(
                [
                    self._loss(packed, index, make_batch(store, batch, self.ranks.device))
                    for index, batch in enumerate(self._turns(packed))
                ]
            )
        return sum(losses) if self._counts_loss else 0.0

    def _compute(
        self, packed: PackedStep, step: int, labels: int
    ) -> tuple[list[float], float, float]:
        """Forward and backward of this rank's micro-batches: their losses, busy and idle seconds.

        Only in a pipeline a rank is idle.
        """
        if self.pipeline is not None:
            return self.pipeline.run(packed, step, labels, self.own, self._inserted)
        losses: list[torch.Tensor] = []
        turns = self._turns(packed)
        spans = DeviceSpans(self.journal, make_marks(self.ranks.device))
        for index, micro_batch in enumerate(turns):
            with self.own.reading():
                batch = make_batch(self.store, micro_batch, self.ranks.device)
            last = index == len(turns) - 1 and not self.model.sums_at_end
            self.model.prepare_micro_batch(last=last)
            with spans.span("forward", step=step, micro_batch=index):
                loss = self._loss(packed, index, batch)
            with spans.span("backward", step=step, micro_batch=index):
                (loss / labels).backward()
            losses.append(loss.detach())
        busy_s = spans.write()
        return read_losses(losses), busy_s, 0.0

    def _sum_gradients(self) -> None:
        if self.pipeline is not None:
            self.pipeline.sum_gradients()
        elif self.model.sums_at_end:
            self.model.sum_gradients()
        if self.modality is not None:
            self.modality.modality.sum_gradients()

    def _norm(self) -> torch.Tensor:
        """Norm of the gradients of all ranks, each weight counted once."""
        if self.pipeline is None:
            return global_norm(self.model.decoder)
        counted, group = self.pipeline.counted, self.pipeline.group
        return global_norm(self.model.decoder, counted=counted, stages=group)

    def _turns(self, packed: PackedStep) -> tuple[MicroBatch, ...]:
        """The micro-batches that this rank computes, alone or with others."""
        if self.sharing is None:
            return packed.ranks[self.ranks.rank]
        return self.sharing.turns(packed)

    def _loss(self, packed: PackedStep, turn: int, batch: Batch) -> torch.Tensor:
        share = whole(batch) if self.sharing is None else self.sharing.share(packed, turn, batch)
        more = {} if self.modality is None else {"inserted": self.modality.of_turn(turn)}
        decoder = self.model.decoder
        loss: torch.Tensor = decoder(share.tokens_t, share.pack, labels_T=share.labels_t, **more)
        return loss

    def _inserted(self, turn: int) -> Inserted | None:
        """Rows of images and sound of one of this rank's micro-batches."""
        return None if self.modality is None else self.modality.of_turn(turn)

    @property
    def _counts_loss(self) -> bool:
        return self.sharing is None or self.sharing.counts_loss

    @property
    def _exchanges(self) -> bool:
        """Whether ranks exchange within micro-batches what the plan says."""
        layout = None if self.model.mesh is None else self.model.mesh.layout
        is_split = layout and (layout.dp < layout.world or layout.ep * layout.etp > 1)
        return self.model.zero >= 2 or bool(is_split) or isinstance(self.sharing, Partners)
