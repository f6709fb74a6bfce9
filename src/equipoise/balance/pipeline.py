"""Compare pipeline strategies: from packed micro-batches to each strategy's step.

What it decides
    Each strategy's schedule is written for these micro-batches, proven by ``check_pipeline`` and
    replayed. Micro-batches are priced by their own documents. The pipeline is that of one
    data-parallel rank, and one rank computes each stage.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from equipoise.balance.packing.divided import macro_units
from equipoise.balance.stage import (
    LayerPrices,
    StageSplit,
    price_layers,
    price_stages,
    split_model,
)
from equipoise.base.arrays import Ints
from equipoise.base.errors import EquipoiseError, FitError, LayoutError
from equipoise.base.units import format_bytes
from equipoise.cost.curve import counted_curve
from equipoise.cost.memory.layer import token_bytes
from equipoise.schedule.attention.score import AssumedMachine
from equipoise.schedule.pipeline.bound import bound_pipeline
from equipoise.schedule.pipeline.check import check_pipeline, find_excess
from equipoise.schedule.pipeline.instruction import OP, Op
from equipoise.schedule.pipeline.prices import PipelinePrices
from equipoise.schedule.pipeline.replay import PipelineTimeline, count_in_flight, replay_pipeline
from equipoise.schedule.pipeline.schedule import PipelineSchedule
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch
from equipoise.spec.recompute import layer_recompute
from equipoise.spec.run.spec import Recompute


@dataclass(frozen=True, slots=True)
class PipelineSetting:
    """The setting in which strategies are compared."""

    strategy: str
    """A name in ``spec.catalog.SCHEDULES``, or ``all``."""
    ranks: int
    batches: tuple[MicroBatch, ...]
    """The packed micro-batches of one step."""
    model: ModelSpec
    machine: AssumedMachine
    chunks: int | None = None
    """Stages of a rank; those usual for each strategy unless given."""
    dtype: str = "bf16"
    """Dtype of activations: bf16 or fp32."""
    recompute: Recompute = "none"
    most_bytes: int | None = None
    """Activations that a rank may hold; unbounded unless given [bytes]."""
    most_held: float | None = None
    """The same in mean micro-batches, instead of ``most_bytes``."""
    skip: float = 0.25
    """Share of the inner stages that each micro-batch leaves out, for strategies that skip."""
    is_arranged: bool = False
    """Whether micro-batches may enter in another order than they are packed."""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineStep:
    """A setting's micro-batches with their prices."""

    setting: PipelineSetting
    layers: LayerPrices
    """Forward times of one layer and of the head."""
    hop_ns: Ints
    """What each micro-batch takes from one stage to the next, int64 [micro-batches] [ns]."""
    token_bytes: int
    """Activations of one token in one layer, kept for its backward [bytes]."""
    units: list[tuple[int, int]]
    """Runs of micro-batches that share documents over time."""

    @property
    def documents(self) -> int:
        """Documents that the micro-batches hold, each once however it is divided."""
        divided, whole = set[tuple[int, int]](), 0
        for batch in self.setting.batches:
            if batch.attends_from is None:
                whole += len(batch.pieces)
            else:
                starts = batch.attends_from.tolist()
                divided |= set(zip(batch.pieces[:, 0].tolist(), starts, strict=True))
        return whole + len(divided)

    @property
    def share_bytes(self) -> float:
        """Activations of the mean micro-batch in a rank's share of the layers [bytes]."""
        tokens = int(self.layers.tokens.sum())
        whole = self.token_bytes * self.setting.model.layers * tokens
        return whole / len(self.setting.batches) / self.setting.ranks

    @property
    def most_bytes(self) -> int | None:
        """Activations that a rank may hold, if a bound is set [bytes]."""
        if self.setting.most_held is not None:
            return round(self.setting.most_held * self.share_bytes)
        return self.setting.most_bytes


@dataclass(frozen=True, slots=True, eq=False)
class PipelineScore:
    """One strategy with its figures."""

    name: str
    chunks: int
    """Stages of a rank."""
    split: StageSplit
    schedule: PipelineSchedule
    timeline: PipelineTimeline
    held_bytes: Ints
    """The most that each rank holds at a time, int64 [ranks] [bytes]."""
    bound_ns: int | None
    """No schedule of these stages takes less; None where stages are left out [ns]."""

    @property
    def title(self) -> str:
        """Strategy and stages of a rank, as pictures name it."""
        return self.name if self.chunks == 1 else f"{self.name}, {self.chunks} stages a rank"

    @property
    def most_bytes(self) -> int:
        """Activations of the rank that holds most [bytes]."""
        return int(self.held_bytes.max(initial=0))

    @property
    def over_bound(self) -> float | None:
        """Makespan over its lower bound [ratio]."""
        if self.bound_ns is None:
            return None
        return self.timeline.makespan_ns / self.bound_ns if self.bound_ns else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class PipelineAnswer:
    """Strategies compared on one step."""

    step: PipelineStep
    scores: tuple[PipelineScore, ...]
    left_out: tuple[tuple[str, str], ...]
    """Strategies that cannot run, and why not, a sentence each."""


def compare_pipelines(setting: PipelineSetting) -> PipelineAnswer:
    """Write, prove and replay a step under one strategy, or under all of them.

    Raises:
        SpecError: no strategy has that name.
        LayoutError: the one strategy, or every one, cannot run on these stages.
        FitError: likewise, within the bound; says what fits.
    """
    step = _price(setting)
    if setting.strategy == "all":
        scores, left_out = _score_all(step)
        if not scores:
            raise LayoutError(f"No strategy can run: {left_out[0][1]}")
        return PipelineAnswer(step, scores, left_out)
    chunks = setting.chunks or _usual_chunks(setting.strategy)[0]
    try:
        return PipelineAnswer(step, (_score(setting.strategy, chunks, step),), ())
    except FitError as fault:
        others, _ = _score_all(step)
        fitting = [f"{each.title} ({format_bytes(each.most_bytes)})" for each in others]
        fix = (
            f"These fit: {', '.join(fitting)}."
            if fitting
            else "Nothing fits: allow more, or make micro-batches smaller."
        )
        raise FitError(f"{fault} {fix}") from None


def _price(setting: PipelineSetting) -> PipelineStep:
    model, link = setting.model, setting.machine.link
    width = 2 if setting.dtype == "bf16" else 4
    curve = counted_curve(model, flop_per_s=setting.machine.flop_per_s)
    layers = price_layers(curve, model, setting.batches)
    hop_s = link.latency_s + layers.tokens * model.hidden * width / link.bytes_per_s
    kept = [
        token_bytes(
            model,
            Layout(),
            width=width,
            sparse=model.is_sparse(layer),
            recompute=layer_recompute(setting.recompute, layer),
        ).kept
        for layer in range(model.layers)
    ]
    return PipelineStep(
        setting,
        layers,
        hop_ns=np.rint(1e9 * hop_s).astype(np.int64),
        token_bytes=round(sum(kept) / model.layers),
        units=macro_units(setting.batches),
    )


def _score_all(
    step: PipelineStep,
) -> tuple[tuple[PipelineScore, ...], tuple[tuple[str, str], ...]]:
    scores, left_out = [], []
    chunks = step.setting.chunks
    for name in SCHEDULES:
        for each in (chunks,) if chunks else _usual_chunks(name):
            try:
                scores.append(_score(name, each, step))
            except EquipoiseError as fault:
                left_out.append((name, str(fault)))
    return tuple(scores), tuple(left_out)


def _usual_chunks(name: str) -> tuple[int, ...]:
    """Stages of a rank, if not given; strategies with several are compared at each."""
    traits = SCHEDULES[name]
    if traits.is_lossy:  # with one stage a rank there are few to leave out
        return (2,)
    is_any = traits.least_stages == 1 and traits.most_stages is None
    return (1, 2) if is_any else (traits.least_stages,)


def _score(name: str, chunks: int, step: PipelineStep) -> PipelineScore:
    setting = step.setting
    split = split_model(step.layers, setting.model, setting.ranks * chunks)
    made = price_stages(split, step.layers, hop_ns=step.hop_ns, recompute=setting.recompute)
    prices = replace(made, activation=made.activation * step.token_bytes)
    schedule = _write(name, prices, step)
    check_pipeline(schedule, allow_lossy=SCHEDULES[name].is_lossy)
    return PipelineScore(
        name=name,
        chunks=chunks,
        split=split,
        schedule=schedule,
        timeline=replay_pipeline(schedule, prices),
        held_bytes=count_in_flight(schedule, prices.activation).peak,
        bound_ns=None if schedule.is_lossy else bound_pipeline(prices, schedule.rank_of),
    )


def _write(name: str, prices: PipelinePrices, step: PipelineStep) -> PipelineSchedule:
    setting, allowed = step.setting, step.most_bytes
    write = partial(
        write_pipeline,
        name,
        prices,
        ranks=setting.ranks,
        units=step.units,
        skip=setting.skip if SCHEDULES[name].is_lossy else 0.0,
        arranged=setting.is_arranged,
    )
    if allowed is None:
        return write()
    if SCHEDULES[name].adapts:
        try:
            return write(most_held=allowed)
        except FitError:
            rank, least = _largest_unit(write(), prices.activation)
            raise FitError(
                f"{name} needs {format_bytes(least)} for the largest micro-batch, or those that "
                f"share a document, on rank {rank}, {format_bytes(allowed)} are allowed: "
                f"{format_bytes(least - allowed)} too many."
            ) from None
    schedule = write()
    over = find_excess(schedule, prices.activation, np.full(setting.ranks, allowed, dtype=np.int64))
    if over is not None:
        rank, held, _ = over
        raise FitError(
            f"{name} holds {format_bytes(held)} of activations on rank {rank}, "
            f"{format_bytes(allowed)} are allowed: {format_bytes(held - allowed)} too many."
        )
    return schedule


def _largest_unit(schedule: PipelineSchedule, activation: Ints) -> tuple[int, int]:
    """The rank on which one unit leaves most behind, and how much that is."""
    held = np.zeros((schedule.ranks, len(schedule.units)), dtype=np.int64)
    for rank, table in enumerate(schedule.orders):
        _, stage, micro_batch = table[table[:, OP] == Op.FORWARD].T
        np.add.at(held[rank], schedule.unit_of[micro_batch], activation[stage, micro_batch])
    rank = int(held.max(axis=1).argmax())
    return rank, int(held[rank].max())
