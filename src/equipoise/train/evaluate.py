"""The held-out loss: documents that are not trained, forward only, on the ranks of the run.

Why
    Whether a model learns or remembers is seen on documents that it was not trained on, and
    whether it learns long documents is seen by their length. Both must be the same numbers on every
    layout, or two runs cannot be compared.

What it decides
    ::

        documents -> pieces of each bucket of lengths -> micro-batches of one bucket each
        sum of losses of each bucket, over all ranks / labels of each bucket, counted in integers

    *What it leaves.* Weights, gradients, routers' counts and the optimizer are as before. Experts
    drop no rows in an evaluation, because which rows they drop depends on the pack.

    *When.* Before the first step, every ``eval.every_steps`` steps, and after the last; before the
    checkpoint of that step, so that a resumed run evaluates on the same steps.

Kept true (tests/multi/train/test_evaluate.py)
    On every layout the loss and every bucket equal those of one rank and of the documents one by
    one; the same layout gives the same bits; training goes on to the bit as without it.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from equipoise.base.digest import digest
from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.cost.curve import LoadCurve
from equipoise.data.cache.store import check_vocabulary, open_store
from equipoise.data.held_out import find_trained
from equipoise.nn.device.clock import busy_clock
from equipoise.nn.device.memory import forget_peak
from equipoise.nn.moe.layer import Router
from equipoise.nn.packed import PackedModel
from equipoise.observe.console import StepView
from equipoise.observe.journal import Journal
from equipoise.sim.rank_loads import ContextPlanner
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.train.held_out import forward_curve, open_held_out, pack_held_out
from equipoise.train.process import return_freed_memory
from equipoise.train.sinks.catalog import Sinks
from equipoise.train.step import StepRunner

_NAMED_DOCUMENTS = 3
"""Most documents that a notice names."""


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """One evaluation."""

    step: int
    loss: float
    """Mean over all labels [nats]."""
    bucket_loss: list[float]
    """Mean of each bucket; not a number where a bucket has no label [nats]."""
    bits_per_byte: float | None
    """Sum of losses over the bytes of text that the labels stand for; None where unknown."""
    eval_s: float
    rank_busy_s: list[float]

    @property
    def perplexity(self) -> float:
        """``e`` to the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def __str__(self) -> str:
        """The sentence for the console."""
        more = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.3f} bits per byte"
        return (
            f"Held-out loss {self.loss:.3f} (step {self.step}): perplexity "
            f"{self.perplexity:,.2f}{more}."
        )


class Evaluator:
    """Measures the held-out loss of a run that names held-out documents; of others nothing."""

    def __init__(
        self,
        resolved: ResolvedFile,
        ranks: Ranks,
        journal: Journal,
        runner: StepRunner,
        curve: LoadCurve,
    ) -> None:
        """Open the documents and pack them; every rank calls it.

        Raises:
            DataError: the cache of the documents is damaged, or none has a label.
        """
        self._spec, self._runner = resolved.spec, runner
        self._ranks, self._journal = ranks, journal
        self.spent_s = 0.0
        """What evaluations between steps have taken [s]."""
        self._is_wanted = bool(resolved.eval_corpus)
        if not self._is_wanted:
            return
        spec = resolved.spec
        self._store = open_store(Path(resolved.eval_corpus))
        check_vocabulary(self._store, resolved.model.vocab)
        self._held = open_held_out(self._store, spec.eval, spec.pack.context_tokens, ranks)
        self._curve = forward_curve(curve)
        data_ranks = ranks.world // spec.layout.sharing
        self._groups = pack_held_out(self._held.pieces, spec, data_ranks, self._curve)
        self._digest = digest([packed.digest for _, packed in self._groups])
        self._predicted_s = self._predict()

    def is_due(self, step: int) -> bool:
        """Whether the held-out loss is measured after this step."""
        if not self._is_wanted:
            return False
        every = self._spec.eval.every_steps or self._spec.checkpoint.usual_steps
        return step % every == 0 or step >= self._spec.train.steps

    def begin(self, step: int, view: StepView, sinks: Sinks) -> None:
        """Say which documents are also trained on; evaluate a run before its first step.

        A run that has no step left is evaluated again: it may be asked about other documents.
        """
        if self._is_wanted:
            self._notice_trained(step, view)
            if step == 0 or step >= self._spec.train.steps:
                self.look(step, view, sinks)

    def look(self, step: int, view: StepView, sinks: Sinks) -> None:
        """Evaluate if it is due: journal it, write its figures, say it."""
        if not self.is_due(step):
            return
        with self._journal.span("evaluate", step=step):
            made = self.evaluate(step)
        self.spent_s += made.eval_s if step else 0.0
        if self._ranks.rank == 0:
            self._write(made)
        self._journal.flush()
        named = zip(self._held.least_tokens.tolist(), made.bucket_loss, strict=True)
        of_lengths = {f"loss_from_{least}": loss for least, loss in named}
        sinks.write(step, {"loss": made.loss, **of_lengths}, section="eval")
        view.say(str(made))

    def evaluate(self, step: int) -> HeldOutLoss:
        """The held-out loss of the weights as they are; every rank calls it.

        Raises:
            LayoutError: ranks packed the documents differently.
            DataError: the cache of the documents is damaged.
        """
        began, clock = time.perf_counter(), busy_clock(self._ranks.device)
        sums = np.zeros(len(self._held.pieces))
        begun = clock()
        with _without_drops(self._runner.model.decoder):
            for bucket, packed in self._groups:
                sums[bucket] += self._runner.evaluate(packed, self._store)
        self._runner.model.free_gathered()
        busy_s = clock() - begun
        name = float(int(self._digest[:12], 16))  # 48 bits are exact in float64
        rows = self._ranks.gather_floats([name, busy_s, *sums.tolist()])
        if bool((rows[:, 0] != name).any()):
            raise LayoutError(
                "Ranks packed the held-out documents differently. Give every machine the same "
                "version of equipoise and of NumPy."
            )
        sums = rows[:, 2:].sum(0).numpy()
        labels = self._held.counts[2]
        with np.errstate(invalid="ignore"):
            bucket_loss = sums / labels
        text_bytes = int(self._held.counts[3].sum())
        bits = float(sums.sum()) / math.log(2) / text_bytes if text_bytes else None
        return_freed_memory()
        forget_peak(self._ranks.device)  # the forecast is compared with the peak of steps
        return HeldOutLoss(
            step,
            float(sums.sum() / labels.sum()),
            bucket_loss.tolist(),
            bits if self._held.has_bytes else None,
            time.perf_counter() - began,
            rows[:, 1].tolist(),
        )

    def _write(self, made: HeldOutLoss) -> None:
        documents, tokens, labels, text_bytes = self._held.counts.tolist()
        self._journal.write(
            "scalar",
            "eval",
            step=made.step,
            loss=made.loss,
            perplexity=made.perplexity,
            bits_per_byte=made.bits_per_byte,
            **self._held.total,
            eval_s=made.eval_s,
            predicted_s=self._predicted_s,
            rank_busy_s=made.rank_busy_s,
            corpus=self._store.digest,
            buckets={
                "least_tokens": self._held.least_tokens.tolist(),
                "documents": documents,
                "tokens": tokens,
                "labels": labels,
                "text_bytes": text_bytes if self._held.has_bytes else None,
                "loss": made.bucket_loss,
            },
        )

    def _predict(self) -> float:
        """Predicted compute of the slowest rank [s]."""
        spec, total = self._spec, np.zeros(self._ranks.world // self._spec.layout.pp)
        planner = self._planner
        for _, packed in self._groups:
            loads = planner.context_loads(packed, self._curve).divided(spec.layout.tp)
            total += np.array(loads.predicted_s)
        return float(total.max()) / spec.layout.pp

    @property
    def _planner(self) -> ContextPlanner:
        sharing = self._runner.sharing
        if sharing is None:
            return ContextPlanner(self._runner.model.decoder.model, self._spec.layout)
        return sharing.planner

    def _notice_trained(self, step: int, view: StepView) -> None:
        """Say which documents are also trained on: their loss says little."""
        said = ""
        if self._ranks.rank == 0:
            both = find_trained(self._store, self._held.documents, self._runner.store)
            if len(both):
                tokens = int(self._store.doc_tokens[both].sum())
                share = tokens / int(self._held.counts[1].sum())
                names = [self._store.name(each) for each in both[:_NAMED_DOCUMENTS].tolist()]
                more = len(both) - len(names)
                said = (
                    f"{len(both):,} of {len(self._held.documents):,} held-out documents "
                    f"({share:.0%} of their tokens) are also trained on, so the held-out loss is "
                    f"too low: {', '.join(names)}{f' and {more:,} more' if more else ''}."
                )
                self._journal.write(
                    "decision", "eval-overlap", step=step, documents=len(both), message=said
                )
        if said:
            view.say(said)


@contextmanager
def _without_drops(decoder: PackedModel) -> Iterator[None]:
    """Let experts take every row that chose them."""
    routers = [each for each in decoder.modules() if isinstance(each, Router)]
    factors = [each.capacity_factor for each in routers]
    for each in routers:
        each.capacity_factor = 0.0
    try:
        yield
    finally:
        for each, factor in zip(routers, factors, strict=True):
            each.capacity_factor = factor
