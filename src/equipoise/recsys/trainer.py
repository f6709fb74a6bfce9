"""Train a recommender on this rank: batches, tables, dense part, scores, and what the journal gets.

What it decides
    A step's global batch is the same samples in the same order on any number of ranks; ranks take
    consecutive shares. The loss is a sum over the global batch, divided by its size once. The
    dense part is copied to all ranks, its gradients are summed. After each epoch the validation
    split is scored, and the weights of the best epoch so far score the test split. A request to
    stop, the file ``stop`` in the run's folder, travels with the loss: all ranks save after the
    same step.

Kept true (tests/multi/recsys/test_train.py, tests/multi/recsys/test_recover.py)
    Two ranks equal one; a resumed run equals one that was not interrupted, to the bit after a
    kill; sent bytes are the predicted ones.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import NonFiniteError
from equipoise.launch.last_words import say_step
from equipoise.observe.journal import EventSink
from equipoise.recsys.ahead.steps import StepInput, StepsAhead
from equipoise.recsys.cache.foresight import caches_of, expect_epoch, predict_hits
from equipoise.recsys.exchange import TimedExchange
from equipoise.recsys.metrics import measure_auc, measure_entropy
from equipoise.recsys.models.catalog import build_model
from equipoise.recsys.models.shards import DensePart
from equipoise.recsys.optimizer import SparseStep
from equipoise.recsys.rank.scorer import run_tiles
from equipoise.recsys.same import describe_run, require_same_run
from equipoise.recsys.samples import Samples
from equipoise.recsys.saving import TableSaver
from equipoise.recsys.sessions.sharing import BatchSharing
from equipoise.recsys.store import RankSaved, load
from equipoise.recsys.tiers.run import fetch_ahead, keep_rows
from equipoise.recsys.towers.tables import make_tables
from equipoise.recsys.whole import newest_whole, read_facts, step_of
from equipoise.schedule.tables.placement import TablePlan
from equipoise.schedule.tables.traffic import STAGES
from equipoise.spec.recommend import RecommendSpec

_REPLAYED = 8192
"""Steps of a run that caches are replayed for at its end."""
StepParts = dict[str, float]
"""Seconds of a step's parts on this rank: ``lookup_s`` (tables without the exchange),
``exchange_s`` and ``reduce_s`` (both with their waits), ``dense_s``; and ``EarlySeconds``."""


@dataclass(slots=True)
class Scores:
    """How well a split is ranked."""

    epoch: int
    step: int
    auc: float
    entropy: float
    test_auc: float
    test_entropy: float


@dataclass(slots=True)
class Traffic:
    """What this rank's tables did, summed over steps since it started."""

    steps: int = 0
    ids: int = 0
    sent: dict[str, Ints] = field(default_factory=dict)


@dataclass(slots=True)
class Trained:
    """How a run ended."""

    step: int
    losses: list[float]
    best: Scores | None
    traffic: Traffic
    reason: str
    """``done``, or ``interrupted`` where the user stopped it."""


def count_epoch_steps(spec: RecommendSpec, samples: Samples) -> int:
    """Steps of an epoch; the last batch may be short."""
    return -(-samples.edges[1] // spec.train.batch)


def draw_order(spec: RecommendSpec, samples: Samples, epoch: int) -> Ints:
    """Training samples in the order of an epoch, int64 [training samples]."""
    source = np.random.Generator(np.random.Philox(key=[spec.train.seed, epoch]))
    return samples.order(source, spec.train.shuffle)


class _Clock:
    """Seconds since it was last read."""

    def __init__(self) -> None:
        self._read = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last call [s]."""
        now = time.perf_counter()
        spent, self._read = now - self._read, now
        return spent


class RankTrainer:
    """One rank of a run."""

    def __init__(
        self,
        folder: Path,
        spec: RecommendSpec,
        samples: Samples,
        plan: TablePlan,
        journal: EventSink,
        exchange: TimedExchange,
        *,
        is_early: bool = True,
    ) -> None:
        """Draw this rank's weights.

        Args:
            folder: The run's.
            spec: The run.
            samples: Its samples.
            plan: Where tables lie.
            journal: What is measured goes here.
            exchange: Among the plan's ranks.
            is_early: Whether a step reads the input and sends the ids of those after it; losses
                are the same to the bit.
        """
        self.folder, self.spec, self.samples, self.plan = folder, spec, samples, plan
        self.journal, self.exchange = journal, exchange
        step = SparseStep(spec.tables.optimizer, lr=spec.tables.lr)
        self._newest, self.damaged = newest_whole(folder, exchange.rank, exchange.ranks)
        if self._newest is not None:
            require_same_run(self._newest, read_facts(self._newest), spec, samples=samples)
        newest = None if self._newest is None else step_of(self._newest)
        kept = keep_rows(spec, samples, plan, step, folder, exchange.rank, newest)
        self.tables = make_tables(spec, plan, exchange, step, kept)
        self._known_epoch = -1
        """The epoch whose steps the tables' caches know."""
        numbers, seed = samples.numbers.shape[1], spec.train.seed
        self.dense = build_model(spec.model, plan.outputs, numbers, seed=seed)
        self.dense_part = DensePart(spec, self.dense, exchange.rank, exchange.ranks)
        self.optimizer = self.dense_part.optimizer
        self.saver = TableSaver(
            folder,
            self.tables,
            self.dense_part,
            describe_run(spec, samples),
            set() if self._newest is None else {self._newest},
            journal,
            has_files=spec.tables.memory_mib > 0,
        )
        self.sharing = BatchSharing(spec, self.dense)
        self._ahead = StepsAhead(self._make_input, is_early=is_early)
        self._order: tuple[int, Ints] = -1, np.zeros(0, dtype=np.int64)
        """The epoch that was drawn last, and its order."""
        self.step = 0
        self.is_asked_to_stop = False
        self.losses: list[float] = []
        self.traffic = Traffic(sent={stage: np.zeros(exchange.ranks, np.int64) for stage in STAGES})
        self.best: Scores | None = None

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch; the last batch may be short."""
        return count_epoch_steps(self.spec, self.samples)

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.spec.train.epochs * self.epoch_steps

    def resume(self) -> int:
        """Go on from the newest whole checkpoint, of any plan and number of ranks; its step."""
        if self._newest is not None:
            saved = load(self._newest, self.tables, self.dense, self.optimizer)
            self.step, self.losses = saved.step, saved.losses
            self.best = None if saved.best is None else Scores(**saved.best)
        return self.step

    def run(self, show: Callable[[str], None], stop_at: int | None = None) -> Trained:
        """Train to the end, or to a step.

        Raises:
            NonFiniteError: the loss is not a number.
            CheckpointError: the last checkpoint could not be written, or any where rows lie in
                files.
        """
        try:
            return self._run(show, min(self.steps, self.steps if stop_at is None else stop_at))
        finally:
            self.saver.close()

    def _run(self, show: Callable[[str], None], end: int) -> Trained:
        while self.step < end and not self.is_asked_to_stop:
            began = time.perf_counter()
            with self.journal.phase("train", step=self.step + 1):
                loss, count, parts = self._train_step(end)
            self.step += 1
            self.losses.append(loss)
            took = time.perf_counter() - began
            self.journal.write(
                "scalar",
                "recommend",
                step=self.step,
                loss=loss,
                samples=count,
                step_s=took,
                ids=int(sum(each.sum() for each in self.tables.ids_received.values())),
                sent_bytes={s: int(each.sum()) for s, each in self.exchange.sent.items()},
                exchanges=self.exchange.swaps,
                **parts,
            )
            if self.exchange.rank == 0:
                say_step(self.step)
            is_epoch = self.step % self.epoch_steps == 0
            if is_epoch:
                with self.journal.phase("evaluate", step=self.step):
                    self._score(show)
            is_due = is_epoch or self.step % self.spec.checkpoint.every_steps == 0
            if is_due or self.is_asked_to_stop:
                best = None if self.best is None else _fields(self.best)
                saved = RankSaved(self.step, self.losses, best)
                is_last = self.step == end or self.is_asked_to_stop
                with self.journal.phase("save", step=self.step):
                    self.saver.save(saved, show, is_last=is_last)
        self._ahead.stop()
        with self.journal.phase("save", step=self.step):
            self.saver.settle(show, is_needed=True)
        reason = "interrupted" if self.is_asked_to_stop else "done"
        return Trained(self.step, self.losses, self.best, self.traffic, reason)

    def _share(self, index: Ints) -> Ints:
        ranks, rank = self.exchange.ranks, self.exchange.rank
        return index[rank * len(index) // ranks : (rank + 1) * len(index) // ranks]

    def predict_hits(self) -> dict[str, tuple[int, int]]:
        """Hits and reads of the steps that this process took, for tables behind a cache.

        Beyond ``_REPLAYED`` steps of the run, those up to there stand for all.
        """
        shards = caches_of(self.tables)
        if not shards:
            return {}
        begin = self.step - self.traffic.steps
        end = max(min(self.step, _REPLAYED), begin + 1)
        epochs = range(-(-end // self.epoch_steps))
        orders = [draw_order(self.spec, self.samples, epoch) for epoch in epochs]
        steps, batch = range(begin, end), self.spec.train.batch
        rank, ranks = self.exchange.rank, self.exchange.ranks
        return predict_hits(shards, rank, ranks, self.samples, orders, batch, steps)

    def _draw(self, step: int) -> Ints:
        """The samples of a step, over all ranks."""
        epoch, within = divmod(step, self.epoch_steps)
        drawn = self._order
        if drawn[0] != epoch:
            drawn = self._order = epoch, draw_order(self.spec, self.samples, epoch)
        return drawn[1][within * self.spec.train.batch : (within + 1) * self.spec.train.batch]

    def _make_input(self, step: int) -> StepInput:
        """A step's input, from samples alone: another thread makes it."""
        index = self._draw(step)
        jagged, numbers, labels = self.samples.batch(self._share(index))
        delivery = self.tables.deliver(self.sharing.share(jagged))
        return StepInput(len(index), delivery, numbers, labels)

    def _tell_caches(self) -> None:
        """Tell caches that know the coming steps of an epoch those of this one."""
        epoch, batch = self.step // self.epoch_steps, self.spec.train.batch
        if self.spec.tables.cache_policy == "trace" and self._known_epoch != epoch:
            order = draw_order(self.spec, self.samples, epoch)
            expect_epoch(self.tables, self.samples, order, batch, epoch * self.epoch_steps)
            self._known_epoch = epoch

    def _fetch_ahead(self, end: int) -> None:
        """Begin to read from files what the next step of this epoch looks up, on all ranks."""
        coming = self.step + 1
        if self.spec.tables.memory_mib and coming < end and coming % self.epoch_steps:
            fetch_ahead(self.tables, self.samples.batch(self._draw(coming))[0])

    def _train_step(self, end: int) -> tuple[float, int, StepParts]:
        self._tell_caches()
        self.exchange.clear()
        self.exchange.spent_s, self.exchange.swaps = 0.0, 0
        clock, waited_s = _Clock(), self.dense_part.meter.waited_s
        given, early = self._ahead.take(self.step, end)
        count, numbers, labels = given.samples, given.numbers, given.labels
        self._ahead.begin_next(early)
        clock.lap()
        spent_s = self.exchange.spent_s
        pooled = self.tables(given.delivery)
        self.sharing.count(given.delivery.batch)
        self._fetch_ahead(end)
        self._ahead.advance()
        tables_s = clock.lap()
        cut = pooled.detach().requires_grad_()
        logits = self.dense(cut, numbers)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        self.optimizer.zero_grad()
        (loss / count).backward()
        asked = self.exchange.rank == 0 and (self.folder / "stop").exists()
        said = torch.tensor([float(loss.detach()) / count, float(asked)], dtype=torch.float64)
        saying = dist.all_reduce(said, async_op=True) if self.exchange.ranks > 1 else None
        dense_s = clock.lap()
        waited_s = self.dense_part.meter.waited_s - waited_s
        end_sums = self.dense_part.begin_sums()
        reduce_s = clock.lap()
        self._ahead.advance()
        pooled.backward(cut.grad)
        tables_s += clock.lap()
        if saying is not None:
            saying.wait()
        total, stops = said.tolist()
        self.is_asked_to_stop = stops > 0
        if not math.isfinite(total):
            raise NonFiniteError(
                f"The loss of step {self.step + 1:,} is not a number. Lower train.lr or tables.lr; "
                "the last checkpoint is whole."
            )
        end_sums()
        reduce_s += clock.lap()
        self.optimizer.step()
        dense_s += clock.lap()
        self.tables.step()
        tables_s += clock.lap()
        self.traffic.steps += 1
        self.traffic.ids += int(sum(each.sum() for each in self.tables.ids_received.values()))
        for stage, sent in self.exchange.sent.items():
            self.traffic.sent[stage] = self.traffic.sent[stage] + sent
        early.ids_s, early.ids_waited_s = given.delivery.travel_s, given.delivery.waited_s
        parts: StepParts = {
            "lookup_s": tables_s - (self.exchange.spent_s - spent_s),
            "exchange_s": self.exchange.spent_s,
            "dense_s": dense_s - waited_s,
            "reduce_s": reduce_s + waited_s,
            **asdict(early),
        }
        return total, count, parts

    def _sum(self, tensor: Tensor) -> Tensor:
        if self.exchange.ranks > 1:
            dist.all_reduce(tensor)
        return tensor

    def _score(self, show: Callable[[str], None]) -> None:
        epoch = self.step // self.epoch_steps
        with self.dense_part.whole():
            (auc, entropy), (test_auc, test_entropy) = map(self.score, ("validation", "test"))
        scores = Scores(epoch, self.step, auc, entropy, test_auc, test_entropy)
        if self.best is None or entropy < self.best.entropy:
            self.best = scores
        self.journal.write("scalar", "ranking", is_best=self.best is scores, **_fields(scores))
        show(
            f"epoch {epoch}: validation AUC {auc:.4f}, normalised entropy {entropy:.4f}; "
            f"test AUC {test_auc:.4f}, {test_entropy:.4f}"
        )

    def score(self, split: str) -> tuple[float, float]:
        """AUC and normalised entropy of a split, over all ranks' samples together."""
        begin, end = self.samples.bounds(split)
        logits = np.zeros(end - begin)
        for at in range(begin, end, 8192):
            index = np.arange(at, min(end, at + 8192))
            logits[at - begin : at - begin + len(index)] = self.logits(index)
        if bad := int(np.sum(~np.isfinite(logits))):
            raise NonFiniteError(
                f"After step {self.step:,}, scores of {bad:,} of {end - begin:,} samples of the "
                f"{split} split are not numbers. Lower train.lr or tables.lr."
            )
        labels = self.samples.labels[begin:end].astype(np.float64)
        return measure_auc(logits, labels), measure_entropy(logits, labels)

    def logits(self, index: Ints) -> Floats:
        """Logits of samples, each computed by one rank."""
        ranks, rank = self.exchange.ranks, self.exchange.rank
        whole = torch.zeros(len(index), dtype=torch.float64)
        jagged, numbers, _ = self.samples.batch(self._share(index))
        with torch.no_grad():
            begin = rank * len(index) // ranks
            own = run_tiles(self.dense, self.tables(self.sharing.share(jagged)), numbers)
            whole[begin : begin + len(own)] = own.double()
        return self._sum(whole).numpy()


def _fields(scores: Scores) -> Mapping[str, Any]:
    return {name: getattr(scores, name) for name in Scores.__slots__}
