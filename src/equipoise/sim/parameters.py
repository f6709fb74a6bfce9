"""Seconds of moving parameters and gradients between data-parallel ranks, and of the optimizer.

What it decides
    ZeRO 0 reduces gradients whole; 1 scatters them and gathers parameters once a step; 2 scatters
    them in every micro-batch, because no rank keeps a sum of its own; 3 gathers each layer's
    parameters in every pass of every micro-batch and scatters its gradients in each, but those of
    layers that ``cost.memory.weights.is_kept_whole`` names, which travel as of 1. What travels in a
    micro-batch hides behind its own computing as far as that lasts. Where each virtual stage sends
    its own, gradients travel from its last backward on, in the order in which stages end, and
    parameters arrive in the order in which they begin. Experts are reduced over the
    ranks that hold the same ones. Parameters travel as wide as they are computed with.

Kept true (tests/unit/sim/test_parts.py, test_parameters.py, test_overlap.py)
    ZeRO 2 and 3 pay per micro-batch; bytes shrink with tensor and expert parallelism; nothing is
    paid on one data-parallel rank; ZeRO 3 gathers in its passes what ``parallel.zero.shard`` does.

Sources
    Traffic of each stage of ZeRO: arXiv:1910.02054, section 7. Copies of shards: PyTorch FSDP,
    arXiv:2304.11277, section 3.2. Buckets of each model chunk: Megatron-Core,
    megatron/core/distributed, --overlap-grad-reduce and --overlap-param-gather.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from equipoise.base.arrays import Flags, Floats, Ints
from equipoise.cost.link import Op
from equipoise.cost.memory.weights import held_groups, is_kept_whole
from equipoise.cost.offload import ADAM_BYTES, host_update_s
from equipoise.cost.step.layer import add
from equipoise.cost.step.request import StepOptions, element_bytes
from equipoise.schedule.pipeline.instruction import Op as PassOp
from equipoise.schedule.pipeline.replay import PipelineTimeline
from equipoise.sim.machine import Machine
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.offload import offloads_optimizer
from equipoise.spec.rank_group import RankGroup

SLOWDOWN = 0.15
"""Share by which computing slows down while a collective runs on the same cores and memory: what
Calculon (SC 2023) charges for NVLink."""


@dataclass(frozen=True, slots=True)
class Held:
    """Weights of one rank, by who shares them."""

    shared: float
    """By the ranks of dp x cp."""
    experts: float
    """By the ranks of edp."""

    def __add__(self, other: "Held") -> "Held":
        return Held(self.shared + other.shared, self.experts + other.experts)

    def __mul__(self, layers: int) -> "Held":
        return Held(layers * self.shared, layers * self.experts)


def held_by_layer(model: ModelSpec, layout: Layout, *, sparse: bool) -> Held:
    """Weights of one layer on one rank."""
    experts = model.experts * model.expert_params / (layout.ep * layout.etp) if sparse else 0.0
    whole = model.count_layer(sparse=sparse, active=False)
    return Held(
        (whole - (model.experts * model.expert_params if sparse else 0)) / layout.tp, experts
    )


@dataclass(frozen=True, slots=True)
class Moved:
    """Weights of one layer on one rank, by when they travel."""

    once: Held
    """Once a step."""
    in_passes: Held
    """In every pass of every micro-batch."""


def moved_by_layer(
    model: ModelSpec, layout: Layout, options: StepOptions, *, sparse: bool
) -> Moved:
    """When one layer's weights travel: of ZeRO 3 as ``parallel.zero.shard`` keeps or gathers them.

    >>> from equipoise.spec.model.presets import preset
    >>> model, options = preset("2m"), StepOptions(4096, 4, precision="fp32")
    >>> moved_by_layer(model, Layout(dp=2, zero=3), options, sparse=False).in_passes.shared
    0.0
    """
    held, nothing = held_by_layer(model, layout, sparse=sparse), Held(0.0, 0.0)
    if layout.zero < 3:
        return Moved(held, nothing)
    alike = (layer for layer in range(model.layers) if model.is_sparse(layer) == sparse)
    _, groups = held_groups(model, layout, [*alike][:1], embeds=False, has_head=False)
    width = element_bytes(options.precision)
    if not groups or not is_kept_whole(groups[0], width=width, zero=layout.zero, pp=layout.pp):
        return Moved(nothing, held)
    if len(groups) == 1:
        return Moved(held, nothing)
    return Moved(Held(held.shared, 0.0), Held(0.0, held.experts))


def held_by_ends(model: ModelSpec, layout: Layout) -> float:
    """Weights of one vocabulary table on one rank."""
    return model.hidden * model.vocab / layout.tp


def gather_s(machine: Machine, layout: Layout, held: Held, element_bytes: float) -> float:
    """Gather parameters, or scatter gradients, of ``weights`` weights from their shards [s]."""
    return _over(machine, layout, held, element_bytes, "all_gather")


def reduce_s(machine: Machine, layout: Layout, held: Held, element_bytes: float) -> float:
    """Sum gradients of the held weights into shards, and over copies of shards [s]."""
    operation: Op = "all_reduce" if layout.zero == 0 else "reduce_scatter"
    seconds = _over(machine, layout, held, element_bytes, operation)
    if layout.replicas > 1 and layout.zero:
        step = layout.zero_ranks // layout.replicas
        copies = machine.collective(_sharers(layout).copies)
        seconds += copies("all_reduce", held.shared * element_bytes / step)
    return seconds


@dataclass(frozen=True, slots=True)
class _Sharers:
    """Ranks of the groups of rank 0."""

    shards: RankGroup
    """Ranks that share the weights outside experts, each a shard."""
    copies: RankGroup
    """Ranks that hold the same shard."""
    alike: RankGroup
    """Ranks that hold the same experts."""


@functools.lru_cache(maxsize=1024)
def _sharers(layout: Layout) -> _Sharers:
    size = layout.zero_ranks // layout.replicas if layout.zero else layout.zero_ranks
    # Layouts that differ in what no group depends on have equal groups.
    dense = replace(layout, zero=1, replicas=1, ep=1, etp=1)
    sparse = replace(layout, zero=1, replicas=1)
    every = "dp", "cp"
    copies = RankGroup(dense, every, layout.zero_ranks // size, step=size)
    return _Sharers(RankGroup(dense, every, size), copies, RankGroup(sparse, ("edp",), layout.edp))


def between_s(reduce_s: float, backward_s: float, *, overlaps: bool) -> float:
    """What a micro-batch before the last pays for scattering its gradients, of ZeRO 2 [s].

    Args:
        reduce_s: Of all gradients of the rank.
        backward_s: Of the micro-batch, which they travel beside.
        overlaps: Whether they travel beside it.

    >>> between_s(1.0, 4.0, overlaps=True), between_s(1.0, 4.0, overlaps=False)
    (0.15, 1.0)
    """
    return _beside(reduce_s, backward_s if overlaps else 0.0)


def _beside(travels_s: float, computes_s: float) -> float:
    """What is left of traffic beside computing, and what it slows that down."""
    hidden = min(travels_s, computes_s)
    return travels_s - hidden + SLOWDOWN * hidden


def _over(
    machine: Machine, layout: Layout, held: Held, element_bytes: float, operation: Op
) -> float:
    seconds = 0.0
    sharers = _sharers(layout)
    if held.shared and len(sharers.shards) > 1:
        seconds += machine.collective(sharers.shards)(operation, held.shared * element_bytes)
    if held.experts and layout.edp > 1:
        seconds += machine.collective(sharers.alike)(operation, held.experts * element_bytes)
    return seconds


@dataclass(frozen=True, slots=True, eq=False)
class Travel:
    """What moves once a step, of each pipeline rank, float64 [pp] [s]."""

    gather_s: Floats
    reduce_s: Floats
    optimizer_s: Floats
    layers: Ints
    """That each holds, int64 [pp]."""


def travel_of(
    model: ModelSpec,
    machine: Machine,
    layout: Layout,
    options: StepOptions,
    layers: Sequence[Sequence[int]],
) -> Travel:
    """Gather, reduce and update what each pipeline rank holds, as if nothing hid it.

    Args:
        model: Sizes.
        machine: Links and memory.
        layout: Degrees.
        options: Stack and residuals.
        layers: Numbers of the layers of each pipeline rank.
    """
    stack, slow = options.stack, options.residuals.traffic
    width = element_bytes(options.precision)
    each = [held_by_layer(model, layout, sparse=sparse) for sparse in (False, True)]
    once = [moved_by_layer(model, layout, options, sparse=sparse).once for sparse in (False, True)]
    rows: dict[tuple[int, int, int], tuple[float, float, float]] = {}
    by_rank = []
    for rank, mine in enumerate(layers):
        sparse = sum(map(model.is_sparse, mine)) if model.experts else 0
        tables = (rank == 0) + (rank == layout.pp - 1) - (model.tied and layout.pp == 1)
        key = len(mine) - sparse, sparse, tables
        if key not in rows:
            held = moved = Held(tables * held_by_ends(model, layout), 0.0)
            for count, one, travels in zip(key[:2], each, once, strict=True):
                held, moved = held + one * count, moved + travels * count
            rows[key] = (
                gather_s(machine, layout, moved, width) * slow if layout.zero else 0.0,
                reduce_s(machine, layout, moved, stack.grad_bytes) * slow,
                optimizer_s(machine, layout, held, options),
            )
        gather, reduce, update = rows[key]
        if (trained := options.trained) is not None:
            ends = {"embeds": rank == 0, "has_head": rank == layout.pp - 1}
            share = trained.of_rank(model, mine, **ends)
            reduce, update = share * reduce, share * update
        by_rank.append((gather, reduce, update))
    gather, reduce, optimizer = np.array(by_rank).T
    return Travel(gather, reduce, optimizer, np.array([len(mine) for mine in layers]))


def pass_traffic(
    parts: Floats,
    model: ModelSpec,
    machine: Machine,
    layout: Layout,
    options: StepOptions,
    *,
    sparse: bool,
) -> None:
    """Add what a layer waits for its parameters and gradients in each pass, of ZeRO 3."""
    if layout.zero < 3 or layout.zero_ranks == 1:
        return
    held = moved_by_layer(model, layout, options, sparse=sparse).in_passes
    slow = options.residuals.traffic / options.stack.rails
    narrow = options.precision == "fp8" and options.stack.gather_fp8
    width = 1 if narrow else element_bytes(options.precision)
    gather = gather_s(machine, layout, held, width) * slow
    reduce = reduce_s(machine, layout, held, options.stack.grad_bytes) * slow
    forward, backward = float(parts[0].sum()), float(parts[1:].sum())
    if not options.stack.data_overlap:
        forward = backward = 0.0
    for row, travels, hides in ((0, gather, forward), (1, gather + reduce, backward)):
        add(parts, row, "parameter traffic", _beside(travels, hides))


def optimizer_s(machine: Machine, layout: Layout, held: Held, options: StepOptions) -> float:
    """The optimizer's pass over this rank's shard, wherever that is [s]."""
    shard = layout.zero_ranks // layout.replicas if layout.zero else 1
    alike = layout.edp if layout.zero else 1
    weights = held.shared / shard + held.experts / alike
    if offloads_optimizer(options.offload):
        return sum(host_update_s(machine.device, weights, options))
    return weights * ADAM_BYTES / machine.bytes_per_s * options.residuals.moves


def exposed_by_stage_s(
    timeline: PipelineTimeline, rank: int, gather_s: float, reduce_s: float, *, layers: int
) -> tuple[float, float]:
    """What nothing hides of gathering parameters before, and of reducing gradients after [s].

    Args:
        timeline: The rank's pipeline, with those of its peers.
        rank: Which rank of the pipeline.
        gather_s: What gathering all its parameters takes.
        reduce_s: What reducing all its gradients takes.
        layers: How many it holds, over all its stages.
    """
    mine = timeline.rank == rank
    forwards = mine & (timeline.op == PassOp.FORWARD)
    begins, stops = _spans(timeline, forwards, first=True)
    share, least = 1.0 / max(1, len(begins)), 1.0 / max(1, layers)
    before, arrived = least * gather_s, 0.0
    start = float(begins.min()) if len(begins) else 0.0
    for at in np.argsort(begins, kind="stable"):
        arrived += share * gather_s
        before = max(before, arrived - float(stops[at] - start))
    begins, stops = _spans(timeline, mine & ~forwards, first=False)
    end, sent = (float(stops.max()) if len(stops) else 0.0), -np.inf
    for at in np.argsort(stops, kind="stable"):
        whole = max(sent, float(begins[at])) + share * reduce_s
        sent = max(whole, float(stops[at]) + least * reduce_s)
    return before, max(sent - end, least * reduce_s)


def _spans(timeline: PipelineTimeline, rows: Flags, *, first: bool) -> tuple[Floats, Floats]:
    """Begin and end of each stage's first or last instruction, float64 [stages] [s]."""
    stage, begin = timeline.stage[rows], timeline.begin_ns[rows]
    end = timeline.end_ns[rows]
    order = np.lexsort((begin if first else -end, stage))
    _, places = np.unique(stage[order], return_index=True)
    chosen = order[places]
    return np.asarray(1e-9 * begin[chosen]), np.asarray(1e-9 * end[chosen])
