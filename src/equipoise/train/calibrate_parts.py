"""Time a training step's own parts on this machine's ranks: short decoders, small steps.

Why
    What a step does between its kernels is only seen where it runs. So small steps of the very
    program that trains are run, on decoders of one and of four layers, and their spans read: the
    difference is three layers, the rest lies outside of layers.

What it decides
    Which decoders and steps: every way of sharing a step that the model allows on these ranks.
    A step has one micro-batch of each size, and in front a copy of one of them, for the first
    gathers parameters. Documents are of 64 tokens, so that the attention core, which is timed by
    itself over lengths, is little. Time is the clock's, as a step's is.

Kept true (tests/multi/test_calibrate_parts.py)
    Every way that a model allows is timed, and its table foresees a step of another depth.
"""

import dataclasses
import itertools
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.balance.stage import StageSplit
from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.cost.curve import counted_curve
from equipoise.data.store import TokenStore
from equipoise.observe.event import Kind
from equipoise.observe.journal import Journal
from equipoise.spec.device_parts import WAYS, Way
from equipoise.spec.layout import Layout
from equipoise.spec.model import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces
from equipoise.spec.resolved import ResolvedFile
from equipoise.spec.run import LayoutSpec, Precision, RunSpec, TrainSpec
from equipoise.train.build import build_runner
from equipoise.train.context import ContextGroup
from equipoise.train.process import settle
from equipoise.train.shares import ContextPlanner
from equipoise.train.stages import StagePlanner
from equipoise.train.step import StepRunner

DEPTHS = (1, 4)
"""Layers of the decoders, of each stage of a pipeline."""

SHORT_TOKENS = 64
"""Of a document of the steps."""

_CLIP = 1e9


@dataclass(frozen=True, slots=True)
class PartsPlan:
    """What is timed."""

    model: ModelSpec
    precision: Precision
    most_tokens: int
    """Of a micro-batch."""
    context_tokens: int
    """Of a document."""
    steps: int = 6
    """After one that warms up."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of micro-batches, whole documents each."""
        most = -(-self.most_tokens // SHORT_TOKENS) * SHORT_TOKENS
        found = {SHORT_TOKENS * 2, SHORT_TOKENS * 16, most}
        return tuple(sorted(size for size in found if size <= most))

    @property
    def doc_tokens(self) -> tuple[int, ...]:
        """Lengths of documents."""
        ladder = {16 * 4**power for power in range(12)} | {self.context_tokens}
        inside = {each for each in ladder if each <= self.context_tokens}
        return tuple(sorted(inside | {SHORT_TOKENS}))

    @property
    def packs(self) -> tuple[tuple[int, ...], ...]:
        """Lengths of documents whose attention over context ranks is timed."""
        whole, most = self.context_tokens, self.sizes[-1]
        return tuple((max(1, whole // parts),) * min(parts, most) for parts in (1, 2, 4, 16))


@dataclass(slots=True)
class StepRecord:
    """Steps of one decoder on one rank: seconds by step."""

    step_s: list[float] = field(default_factory=list)
    spans: dict[tuple[str, int, int], list[float]] = field(default_factory=dict)
    """By name, stage and micro-batch; -1 where a span has none."""
    began: list[float] = field(default_factory=list)
    """First instruction of a pipeline, on the machine's clock."""
    ended: list[float] = field(default_factory=list)


class _Spans(Journal):
    """Keeps spans in memory."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, rank)
        self.found: list[dict[str, Any]] = []

    def write(self, kind: Kind, name: str, *, t: float | None = None, **fields: Any) -> None:
        if kind == "span":
            self.found.append({"name": name, "t": t, **fields})


def layout_of(way: Way, ranks: int, schedule: str = "1f1b") -> LayoutSpec:
    """The layout in which all ranks share a step in this way."""
    if way == "tensor":
        return LayoutSpec(dp=1, tensor=ranks)
    if way == "pipeline":
        return LayoutSpec(dp=1, pipeline=ranks, schedule=schedule)  # type: ignore[arg-type]
    return LayoutSpec(dp=ranks, zero=WAYS.index(way))  # type: ignore[arg-type]


def ways_of(model: ModelSpec, ranks: int) -> tuple[Way, ...]:
    """Ways that this model allows on so many ranks."""
    found: list[Way] = list(WAYS[:4])
    if ranks > 1:
        try:
            Layout(tp=ranks).require_model(model)
            found.append("tensor")
        except LayoutError:
            pass
        found.append("pipeline")
    return tuple(found)


def time_way(ranks: Ranks, plan: PartsPlan, way: Way) -> dict[tuple[int, str], StepRecord]:
    """Steps of each depth, and of a pipeline by each kind of schedule, one after the other."""
    settle(ranks.rank, pin=True)
    schedules = ("1f1b", "zb-h1") if way == "pipeline" else ("1f1b",)
    packed, store = _make_step(plan, 1 if way in ("tensor", "pipeline") else ranks.world)
    records, runners = {}, []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for depth, schedule in itertools.product(DEPTHS, schedules):
            name = Path(folder) / f"{depth}-{schedule}"
            journal = stack.enter_context(_Spans(name, ranks.rank))
            layout = layout_of(way, ranks.world, schedule)
            model = dataclasses.replace(plan.model, layers=depth * layout.pipeline)
            records[depth, schedule] = StepRecord()
            runner = _make_runner(ranks, plan, model, layout, store, journal)
            runners.append((runner, journal, records[depth, schedule]))
        # In turn, so that what passes over the machine meets every depth.
        for step, (runner, journal, record) in itertools.product(range(plan.steps + 1), runners):
            journal.found.clear()
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
                _read_spans(journal.found, record)
    return records


def _read_spans(found: list[dict[str, Any]], record: StepRecord) -> None:
    instructions = []
    for span in found:
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
    store = TokenStore(
        tokens=tokens.astype(np.uint32),  # type: ignore[arg-type]
        doc_tokens=np.full(at, SHORT_TOKENS),
        offsets=np.arange(at + 1) * SHORT_TOKENS,
        origins=np.zeros((at, 2), np.int64),
        vocab=plan.model.vocab,
        end=0,
        tokenizer_file=Path(),
        folder=Path(),
        digest="",
        source_name="drawn",
        source_kind="text",
        empty_documents=0,
        undecodable_documents=0,
    )
    return PackedStep("by-work", tuple(rows)), store


def _make_runner(
    ranks: Ranks,
    plan: PartsPlan,
    model: ModelSpec,
    layout: LayoutSpec,
    store: TokenStore,
    journal: Journal,
) -> StepRunner:
    planner, stages = ContextPlanner(model, layout), None
    if layout.pipeline > 1:
        each = model.layers // layout.pipeline
        edges = np.arange(0, model.layers + 1, each)
        split = StageSplit(edges, np.ones(layout.pipeline))
        stages = StagePlanner(
            planner, counted_curve(model), "none", split, np.arange(layout.pipeline)
        )
    sharing = ContextGroup.join(ranks, planner, stages)
    spec = RunSpec(train=TrainSpec(precision=plan.precision), layout=layout)
    resolved = ResolvedFile(spec, model, {}, ranks.world, "", "")
    return build_runner(resolved, ranks, store, journal, sharing)
