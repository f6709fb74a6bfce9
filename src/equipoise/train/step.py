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
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from equipoise.base.errors import LayoutError, NonFiniteError
from equipoise.comm.group import Ranks
from equipoise.data.batch import Batch, count_labels, make_batch
from equipoise.data.cache.store import TokenStore
from equipoise.nn.decoder import Decoder
from equipoise.nn.device.clock import await_device, make_marks
from equipoise.nn.moe.balance import forget_loads, set_loss_scale
from equipoise.observe.journal import EventSink
from equipoise.observe.machine import run_delay_s
from equipoise.optim.adamw import clip, global_norm
from equipoise.parallel.expert.loads import settle_experts
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.train.context import ContextGroup, whole
from equipoise.train.pipeline import PipelineRunner, read_losses
from equipoise.train.spans import DeviceSpans
from equipoise.train.together import Partners

_NAMED_DOCUMENTS = 8
"""Most documents that a message names."""


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """Choices of all ranks' routers in a step."""

    loads: list[list[int]]
    """Tokens that chose each expert, by sparse layer."""
    balance_loss: float
    """Auxiliary loss for each label."""


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
    """What ranks exchanged, float64 [ranks, 6]; columns as ``StepRunner`` lists them."""
    wait_s: float
    """What this rank waited."""
    run_delay_s: float
    """What other programs kept this rank from a core; NaN where the system does not say."""


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
    """What other programs kept this rank from a core; NaN where the system does not say."""
    computed_s: float
    """Until the last rank had computed: its busy time, or its pipeline from end to end."""
    stop: bool
    words: list[int]
    """What each rank had to tell the others."""
    experts: ExpertLoads | None

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
        for what, value in (("loss", made.loss), ("gradient norm", made.norm)):
            if not np.isfinite(value):
                raise self._not_finite(what, step, packed, made.losses, last_good())
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
            experts = self._settle_experts(max(1, made.labels))
            await_device(self.ranks.device)
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
        labels = sum(int(count_labels(batch.pieces, self.store).sum()) for batch in packed)
        divisor = max(1, labels)
        set_loss_scale(self.model.decoder, 1 / divisor)
        losses, busy_s, idle_s = self._compute(packed, step, divisor)
        computed_s = time.perf_counter() - started
        rows, met_s = self._meet(packed, step, losses, busy_s, computed_s, stop_asked, word)
        with self.journal.span("reduce", step=step):
            self._sum_gradients()
            norm = float(self._norm())  # waits for the device, which the span is about
        loss = float(rows[:, 1].sum()) / divisor
        return Gradients(labels, loss, norm, losses, rows, idle_s + met_s, run_delay_s() - delay_s)

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
        if self.pipeline is not None:
            losses = self.pipeline.evaluate(packed, store)
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
            return self.pipeline.run(packed, step, labels)
        losses: list[torch.Tensor] = []
        turns = self._turns(packed)
        spans = DeviceSpans(self.journal, make_marks(self.ranks.device))
        for index, micro_batch in enumerate(turns):
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

    def _norm(self) -> torch.Tensor:
        """Norm of the gradients of all ranks, each weight counted once."""
        if self.pipeline is None:
            return global_norm(self.model.decoder)
        counted, group = self.pipeline.counted, self.pipeline.group
        return global_norm(self.model.decoder, counted=counted, stages=group)

    def _settle_experts(self, labels: int) -> ExpertLoads | None:
        """Sum what all ranks' routers chose, by which they are balanced in the next step."""
        decoder = self.model.decoder
        if not isinstance(decoder, Decoder) or not decoder.model.experts:
            return None
        loads, penalty = settle_experts(decoder, self.ranks)
        return ExpertLoads(loads.tolist(), float(penalty) / labels)

    def _turns(self, packed: PackedStep) -> tuple[MicroBatch, ...]:
        """The micro-batches that this rank computes, alone or with others."""
        if self.sharing is None:
            return packed.ranks[self.ranks.rank]
        return self.sharing.turns(packed)

    def _loss(self, packed: PackedStep, turn: int, batch: Batch) -> torch.Tensor:
        share = whole(batch) if self.sharing is None else self.sharing.share(packed, turn, batch)
        loss: torch.Tensor = self.model.decoder(share.tokens_t, share.pack, labels_T=share.labels_t)
        return loss

    @property
    def _counts_loss(self) -> bool:
        return self.sharing is None or self.sharing.counts_loss

    def _meet(
        self,
        packed: PackedStep,
        step: int,
        losses: list[float],
        busy_s: float,
        computed_s: float,
        stop_asked: bool,
        word: int,
    ) -> tuple[torch.Tensor, float]:
        """Exchange one row a rank; the fastest rank waits here for the slowest.

        Columns: digest of the pack, loss sum, busy seconds, stop asked, seconds until this rank
        had computed, what else it tells.

        Returns:
            The rows, and the seconds that this took.
        """
        name = float(int(packed.digest[:12], 16))  # 48 bits are exact in float64
        others = [float(stop_asked), computed_s, float(word)]
        row = [name, sum(losses) if self._counts_loss else 0.0, busy_s, *others]
        with self.journal.span("wait", step=step) as span:
            rows = self.ranks.gather_floats(row)
        if bool((rows[:, 0] != name).any()):
            differing = torch.nonzero(rows[:, 0] != name).flatten().tolist()
            raise LayoutError(
                f"Ranks {differing} packed step {step} otherwise than rank {self.ranks.rank}. Give "
                f"every machine the same version of equipoise and of NumPy."
            )
        return rows, span.duration_s

    def _not_finite(
        self,
        what: str,
        step: int,
        packed: PackedStep,
        losses: list[float],
        last_good: Path | None,
    ) -> NonFiniteError:
        bad = [
            batch
            for batch, loss in zip(self._turns(packed), losses, strict=True)
            if not np.isfinite(loss)
        ]
        numbers = {int(number) for batch in bad for number in batch.pieces[:, 0]}
        mine = sorted({number % self.store.documents for number in numbers})
        documents = sorted(set(itertools.chain(*self.ranks.gather_objects(mine))))
        if documents:
            named = [f"{each} ({self.store.name(each)})" for each in documents[:_NAMED_DOCUMENTS]]
            more = len(documents) - len(named)
            where = f"; documents of the micro-batches where it is: {', '.join(named)}"
            where += f" and {more} more" if more else ""
            fix = "Lower train.lr, or look at those documents."
        else:
            where, fix = ", though the loss of every micro-batch is", "Lower train.lr."
        kept = f"the last good checkpoint is {last_good}" if last_good else "no checkpoint yet"
        self.journal.write("fault", "nan-loss", step=step, documents=documents, what=what)
        return NonFiniteError(
            f"The {what} of step {step} is not a number{where}. No weight was changed; {kept}. "
            f"{fix}"
        )
