"""Time a training step's own parts on this machine's ranks: short decoders, small steps.

Why
    A step's time between kernels shows only where it runs. So small steps of the very
    program that trains are run, on decoders of one and of four layers, and their spans read: the
    difference is three layers, the rest lies outside of layers.

What it decides
    Which decoders and steps: every way of sharing a step that the model allows on these ranks.
    A step has one micro-batch of each size, and in front a copy of one of them, for the first
    gathers parameters. Documents are of 64 tokens, so that the attention core, which is timed by
    itself over lengths, is little. Time is the clock's, as a step's is.

Kept true (tests/multi/plan/test_calibrate_parts.py)
    Every way that a model allows is timed, and its table predicts a step of another depth.
"""

import dataclasses
import itertools
import math
import time
from typing import Any

import numpy as np

from equipoise.balance.stage import StageSplit
from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.cost.curve import counted_curve
from equipoise.data.cache.store import TokenStore
from equipoise.observe.event import Kind
from equipoise.observe.journal import EventSink
from equipoise.sim.rank_loads import ContextPlanner
from equipoise.sim.stages import StagePlanner
from equipoise.spec.device.parts import WAYS, Way
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.spec.run.spec import LayoutSpec, RunSpec, TrainSpec
from equipoise.train.build import build_runner
from equipoise.train.calibrate.attention import time_context, time_documents
from equipoise.train.calibrate.parts_plan import (
    DEPTHS,
    SHORT_TOKENS,
    PartsPlan,
    StepRecord,
    WaySamples,
)
from equipoise.train.context import ContextGroup
from equipoise.train.process import settle
from equipoise.train.step import StepRunner

_CLIP = 1e9

_WITH_CONTEXT: tuple[Way, ...] = ("zero-0", "zero-2")
"""Beside whose steps attention over context ranks is timed: twice, minutes apart."""


class _Spans(EventSink):
    """Keeps spans in memory."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

    def write(self, kind: Kind, name: str, *, t: float | None = None, **fields: Any) -> None:
        """Keep a span."""
        if kind == "span":
            self.spans.append({"name": name, "t": t, **fields})


def layout_of(way: Way, ranks: int, schedule: str = "1f1b") -> LayoutSpec:
    """The layout in which all ranks share a step in this way."""
    if way == "tensor":
        return LayoutSpec(dp=1, tp=ranks)
    if way == "pipeline":
        return LayoutSpec(dp=1, pp=ranks, schedule=schedule)
    return LayoutSpec(dp=ranks, zero=WAYS.index(way))  # type: ignore[arg-type]


def ways_of(model: ModelSpec, ranks: int) -> tuple[Way, ...]:
    """Ways that this model allows on this number of ranks."""
    allowed: list[Way] = list(WAYS[:4])
    if ranks > 1:
        try:
            Layout(tp=ranks).require_model(model)
            allowed.append("tensor")
        except LayoutError:
            pass
        allowed.append("pipeline")
    return tuple(allowed)


def time_way(
    ranks: Ranks,
    plan: PartsPlan,
    way: Way,
    limit_s: float = math.inf,
    with_context: bool | None = None,
) -> WaySamples:
    """Steps of each depth, and of a pipeline by each kind of schedule, and attention, in turn.

    Args:
        ranks: All of them.
        plan: Sizes, and how many rounds.
        way: How they share a step.
        limit_s: Time after which no further round begins; the first kept one always is.
        with_context: Whether attention over context ranks is timed beside it; None: beside some.
    """
    began = time.perf_counter()

    def more() -> bool:  # by one rank's clock, so that all take as many
        return bool(ranks.gather_integers([time.perf_counter() - began < limit_s])[0, 0])

    settle(ranks.rank, pin=ranks.device.type == "cpu")
    schedules = ["1f1b", *(["zb-h1"] if way == "pipeline" else [])]
    packed, store = _make_step(plan, 1 if way in ("tensor", "pipeline") else ranks.world)
    samples = WaySamples({})
    attention = [time_documents(ranks, plan, ranks.world if way == "tensor" else 1, samples)]
    is_beside = way in _WITH_CONTEXT if with_context is None else with_context
    if is_beside and ranks.world > 1:
        attention.append(time_context(ranks, plan, samples))
    runners = []
    for depth, schedule in itertools.product(DEPTHS, schedules):
        journal, layout = _Spans(), layout_of(way, ranks.world, schedule)
        model = dataclasses.replace(plan.model, layers=depth * layout.pp)
        samples.steps[depth, schedule] = StepRecord()
        runner = _make_runner(ranks, plan, model, layout, store, journal)
        runners.append((runner, journal, samples.steps[depth, schedule]))
    # In turn, so that passing disturbances hit all alike.
    for step in range(plan.steps + 1):
        if step > 1 and not more():
            break
        for runner, journal, record in runners:
            journal.spans.clear()
            ranks.barrier()
            result = runner.run(
                packed,
                step=step,
                rate=1e-4,
                clip_norm=_CLIP,
                last_good=lambda: None,
                stop_asked=False,
            )
            if step:
                record.step_s.append(result.step_s)
                _read_spans(journal.spans, record)
        for sample in attention:
            sample(step > 0, more)
    return samples


def _read_spans(spans: list[dict[str, Any]], record: StepRecord) -> None:
    instructions = []
    for span in spans:
        key = span["name"], span.get("stage", -1), span.get("micro_batch", -1)
        record.spans.setdefault(key, []).append(span["duration_s"])
        if "stage" in span:
            instructions.append((span["t"], span["t"] + span["duration_s"]))
    if instructions:
        record.began.append(min(begin for begin, _ in instructions))
        record.ended.append(max(end for _, end in instructions))


def _make_step(plan: PartsPlan, data_ranks: int) -> tuple[PackedStep, TokenStore]:
    """A step for each data-parallel rank: the middle size, then every size."""
    sizes = (plan.sizes[len(plan.sizes) // 2], *plan.sizes)
    at, rows = 0, []
    for _ in range(data_ranks):
        batches = []
        for size in sizes:
            count = size // SHORT_TOKENS
            documents = np.arange(at, at + count)
            at += count
            pieces: Pieces = np.stack(
                [documents, np.zeros(count, np.int64), np.full(count, SHORT_TOKENS)], axis=1
            )
            batches.append(MicroBatch(pieces))
        rows.append(tuple(batches))
    tokens = np.random.default_rng(0).integers(0, plan.model.vocab, at * SHORT_TOKENS)
    lengths = np.full(at, SHORT_TOKENS)
    store = TokenStore.in_memory(tokens.astype(np.uint32), lengths, plan.model.vocab)
    return PackedStep("by-work", tuple(rows)), store


def _make_runner(
    ranks: Ranks,
    plan: PartsPlan,
    model: ModelSpec,
    layout: LayoutSpec,
    store: TokenStore,
    journal: EventSink,
) -> StepRunner:
    planner, stages = ContextPlanner(model, layout), None
    if layout.pp > 1:
        each = model.layers // layout.pp
        edges = np.arange(0, model.layers + 1, each)
        split = StageSplit(edges, np.ones(layout.pp))
        stages = StagePlanner(planner, counted_curve(model), "none", split, np.arange(layout.pp))
    sharing = ContextGroup.join(ranks, planner, stages)
    spec = RunSpec(train=TrainSpec(precision=plan.precision), layout=layout)
    resolved = ResolvedFile(spec, model, {}, ranks.world, "", "")
    return build_runner(resolved, ranks, store, journal, sharing)
