"""Price a whole training step: the product's packs and schedules on a described cluster.

Why
    Planners price steps by formulas: a bubble of ``(p - 1) / m``, documents of one length,
    experts of one load. Each is wrong exactly where a choice matters. Here the step that would
    run is written down by the code that would run it, and replayed.

What it decides
    Layers are priced from their kernels and collectives (``cost.step.layer``), the attention
    core from each micro-batch's documents (``sim.attention``), and put on stages by
    ``balance.stage``. Each data-parallel rank's pipeline is written by
    ``schedule.pipeline.strategies`` and replayed; the step ends with the rank that ends last.
    What travels once a step hides behind that rank's last backward (gradients) and first
    forward (parameters) as far as the stack lets it. A link carries one message at a time, so a
    pipeline takes at least as long as all that one stage sends to the next.

Kept true (tests/unit/sim/test_step.py)
    Terms add up to the step; more of anything never makes it faster; two length histograms of
    equal tokens take different times; ZeRO 2 and 3 pay for every micro-batch.

Sources
    As the modules that it calls.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.base.errors import LayoutError
from equipoise.cost.offload import copies_share, require_host
from equipoise.cost.step.request import TERMS, Stack, StepOptions, StepPrice
from equipoise.cost.step.work import published_flop
from equipoise.cost.work import layer_pairs, useful_flop
from equipoise.sim.divided import DividedStep, keys_bytes, run_divided
from equipoise.sim.divided import Documents as Documents
from equipoise.sim.here import measured_parts
from equipoise.sim.machine import Machine
from equipoise.sim.memory import StageMemory, stage_memory, with_keys
from equipoise.sim.parameters import between_s, exposed_by_stage_s, travel_of
from equipoise.sim.parts import PipelineRun, StepParts, layers_of_ranks, run_pipeline, split_layers
from equipoise.sim.planned import end_of_step_s
from equipoise.sim.turns import fullest_turns, slowest_turns
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec

_TRAFFIC = (
    "tensor traffic",
    "context traffic",
    "expert traffic",
    "parameter traffic",
    "redistribution",
    "offload traffic",
)


@dataclass(frozen=True, slots=True, eq=False)
class StepRun:
    """A priced step with what it was priced from."""

    price: StepPrice
    slowest: PipelineRun
    """The data-parallel rank that ends last."""
    layers: tuple[int, ...]
    """Layers of each stage."""
    memory: StageMemory
    """Peaks of the pipeline ranks, and how much of them comes and goes."""
    sites: tuple[str, ...] = ()
    """Classes of nodes that each pipeline rank stands in; empty where there is one class."""


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """What each pipeline rank does before and after the pipeline, float64 [pp] [s]."""

    before: Floats
    after: Floats
    optimizer: Floats
    host_s: float = 0.0
    """What the host takes in a step, where it was timed."""
    copies: float = 0.0
    """The share of the optimizer that goes into copies to the host and back."""


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """A step before it is added up."""

    rows: Documents | DividedStep
    slowest: PipelineRun
    """The data-parallel rank that ends last."""
    memory: StageMemory
    ends: Ends
    layers: tuple[int, ...]
    """Layers of each stage."""


def uniform_documents(layout: Layout, options: StepOptions) -> Documents:
    """Micro-batches of full windows, all alike."""
    batch = [options.context_tokens] * options.micro_batch
    return [[batch] * options.count_micro_batches(layout)]


def price_step(
    model: ModelSpec,
    machine: Machine,
    layout: Layout,
    options: StepOptions,
    *,
    documents: Documents | DividedStep | None = None,
    parts: StepParts | None = None,
) -> StepPrice:
    """Price one step.

    Args:
        model: Sizes.
        machine: Device and links.
        layout: Degrees; their product is the cluster's devices.
        options: Everything else.
        documents: Lengths of each data-parallel rank's micro-batches, as a packer made them;
            full windows unless given. One row stands for all ranks. A step whose documents are
            divided says what their pieces read in each other.
        parts: Parts of the same setting, which may differ in schedule, virtual stages and ZeRO 0 to
            2: what they have priced is not priced again.

    Raises:
        LayoutError: layout, model, schedule and sequences do not go together.

    Cost: O(instructions) a data-parallel rank with micro-batches of its own.
    """
    return run_step(model, machine, layout, options, documents=documents, parts=parts).price


def run_step(
    model: ModelSpec,
    machine: Machine,
    layout: Layout,
    options: StepOptions,
    *,
    documents: Documents | DividedStep | None = None,
    parts: StepParts | None = None,
) -> StepRun:
    """``price_step``, with the replayed pipeline of the rank that ends last."""
    options.require()
    require_host(machine.device, options.offload)
    layout.require_model(model)
    require_stages(model, layout, options)
    rows = uniform_documents(layout, options) if documents is None else documents
    here = measured_parts(model, machine, layout, options)
    if here is not None and isinstance(rows, DividedStep):
        raise LayoutError(
            f'pack.policy = "{rows.policy}" divides documents, and steps of this model on '
            f"{machine.cluster.name} are priced from parts that were timed with whole ones. Take "
            f'pack.policy = "by-work", or equipoise plan run.toml --measure, which trains choices.'
        )
    if isinstance(rows, DividedStep):
        own = parts or StepParts(model, machine, layout, options)
        split, runs = run_divided(own, rows, layout, options)
    else:
        prices = here or parts or StepParts(model, machine, layout, options)
        split = split_layers(prices.price(typical(rows)), options, layout.pp * options.virtual)
        runs = []
        fullest = fullest_turns(layout, rows)
        for row in slowest_turns(model, layout, rows):
            batches = [prices.price(np.asarray(batch)) for batch in row]
            tokens = fullest or [int(sum(batch)) for batch in row]
            runs.append(run_pipeline(batches, split, layout, options, tokens=tokens))
    slowest = max(runs, key=lambda run: run.timeline.makespan_ns)
    memory = stage_memory(model, layout, options, split, runs)
    held = layers_of_ranks(split, layout, options)
    if isinstance(rows, DividedStep):
        memory = with_keys(memory, keys_bytes(model, layout, options, rows, held))
    if here is None:
        ends = _ends(model, machine, layout, options, slowest, held)
    else:
        ends = Ends(*here.ends(held))
    replayed = Replayed(rows, slowest, memory, ends, tuple(split.layers.tolist()))
    return add_up(model, machine, layout, options, replayed)


def require_stages(model: ModelSpec, layout: Layout, options: StepOptions) -> None:
    """Refuse more stages than layers, embedding and head can fill.

    Raises:
        LayoutError: says how many they can.
    """
    if layout.pp * options.virtual > model.layers + 2 * (layout.pp > 1):
        raise LayoutError(
            f"{model.layers} layers cannot fill {layout.pp} x {options.virtual} stages. Give "
            f"virtual = {max(1, model.layers // layout.pp)} or less, or fewer stages."
        )


def add_up(
    model: ModelSpec, machine: Machine, layout: Layout, options: StepOptions, replayed: Replayed
) -> StepRun:
    """The price of a step whose pipelines were replayed."""
    rows, slowest, memory = replayed.rows, replayed.slowest, replayed.memory
    if isinstance(rows, DividedStep):
        flat, copies = rows.doc_tokens, 1
    else:
        copies = layout.dp if len(rows) == 1 else 1
        flat = np.concatenate([np.asarray(batch, np.int64) for row in rows for batch in row])
    tokens_all, pairs = int(flat.sum()) * copies, layer_pairs(model, flat) * copies
    times = _sum_times(slowest, replayed.ends, options, layout)
    price = StepPrice(
        step_s=times.step_s,
        terms=times.terms,
        busy_s=times.busy_s,
        exposed_s=times.exposed_s,
        bubble_s=times.bubble_s,
        memory=memory.terms,
        memory_bytes=memory.stage_bytes,
        capacity_bytes=machine.capacity_bytes,
        host_bytes=memory.host_bytes,
        host_capacity_bytes=machine.host_capacity_bytes,
        tokens=tokens_all,
        useful_flop=float(useful_flop(model, tokens_all, pairs)),
        published_flop=copies * published_flop(model, flat),
        extrapolated=tuple(sorted(machine.extrapolated)),
    )
    return StepRun(price, slowest, replayed.layers, memory)


def typical(rows: Documents) -> Floats:
    """The micro-batch of median squares: layers are split for it."""
    batches = [np.asarray(batch, np.float64) for row in rows for batch in row]
    weights = np.array([float((batch**2).sum()) for batch in batches])
    return batches[int(np.argsort(weights, kind="stable")[len(weights) // 2])]


def _ends(
    model: ModelSpec,
    machine: Machine,
    layout: Layout,
    options: StepOptions,
    run: PipelineRun,
    layers: list[list[int]],
) -> Ends:
    """Gradients and parameters that travel once a step, as far as nothing hides them.

    And under ZeRO 2 the gradients of the micro-batches before the last.
    """
    travel = travel_of(model, machine, layout, options, layers)
    before, after = np.zeros((2, layout.pp))
    for rank, mine in enumerate(layers):
        reduce = float(travel.reduce_s[rank])
        before[rank], after[rank] = rank_ends_s(
            run,
            rank,
            options.stack,
            float(travel.gather_s[rank]),
            reduce,
            each_s=reduce if layout.zero == 2 else 0.0,
            layers=len(mine),
        )
    copies = copies_share(machine.device, options)
    return Ends(before, after, travel.optimizer_s, copies=copies)


def rank_ends_s(
    run: PipelineRun,
    rank: int,
    stack: Stack,
    gather_s: float,
    reduce_s: float,
    *,
    each_s: float,
    layers: int,
) -> tuple[float, float]:
    """What a rank waits for parameters before its pipeline, and for gradients in it and after [s].

    Args:
        run: The rank's pipeline.
        rank: Which rank of the pipeline.
        stack: What hides what travels.
        gather_s: What gathering all its parameters takes.
        reduce_s: What reducing all its gradients takes.
        each_s: The part of that which is reduced in every micro-batch, as of ZeRO 2.
        layers: How many it holds.
    """
    overlaps = stack.data_overlap
    if stack.stage_overlap and overlaps:
        travel = run.timeline, rank, gather_s, reduce_s
        before, after = exposed_by_stage_s(*travel, layers=layers)
    else:
        before, after = exposed_s(run, rank, gather_s, reduce_s, layers=layers, overlaps=overlaps)
    one = between_s(each_s, float(run.last_backward_s[rank]), overlaps=overlaps)
    return before, after + (len(run.tokens) - 1) * one


def exposed_s(
    run: PipelineRun, rank: int, gather_s: float, reduce_s: float, *, layers: int, overlaps: bool
) -> tuple[float, float]:
    """What nothing hides of gathering parameters before, and of reducing gradients after [s].

    Args:
        run: The rank's pipeline.
        rank: Which rank of the pipeline.
        gather_s: What gathering all its parameters takes.
        reduce_s: What reducing all its gradients takes.
        layers: How many it holds.
        overlaps: Whether they travel beside the first forward and the last backward.
    """
    # What is left when there is nothing more to hide behind: the last bucket of a layer.
    least = 1.0 / max(1, layers)
    forward = float(run.first_forward_s[rank]) if overlaps else 0.0
    backward = float(run.last_backward_s[rank]) if overlaps else 0.0
    return max(gather_s - forward, least * gather_s), max(reduce_s - backward, least * reduce_s)


@dataclass(frozen=True, slots=True, eq=False)
class _Times:
    """The seconds of a ``StepPrice``."""

    step_s: float
    terms: dict[str, float]
    busy_s: Floats
    exposed_s: Floats
    bubble_s: Floats


def _sum_times(run: PipelineRun, ends: Ends, options: StepOptions, layout: Layout) -> _Times:
    """The step's seconds, by term of the rank that computes most."""
    timeline, prices = run.timeline, run.prices
    begins, stops = np.full(layout.pp, np.inf), np.zeros(layout.pp)
    np.minimum.at(begins, timeline.rank, 1e-9 * timeline.begin_ns)
    np.maximum.at(stops, timeline.rank, 1e-9 * timeline.end_ns)
    makespan = 1e-9 * timeline.makespan_ns
    # A rank that begins late, or ends early, hides its own travel in that.
    before = float(np.maximum(ends.before - begins, 0.0).max())
    after = float((stops + ends.after + ends.optimizer).max()) - makespan
    optimizer = min(after, float(ends.optimizer.max()))
    # A replay delays each message by itself, but those of a link follow each other.
    messages_s = 1e-9 * float(prices.hop_ns.sum()) * (prices.stages // layout.pp)
    late = max(0.0, messages_s - makespan) if layout.pp > 1 else 0.0
    pipeline = before + makespan + after + late
    residual_share = options.residuals.step_share
    step_s = end_of_step_s(pipeline, host_s=ends.host_s, residual_share=residual_share)
    busy = run.parts.sum(axis=1)
    top = int(busy.argmax())
    exposed = run.parts[:, [TERMS.index(name) for name in _TRAFFIC]].sum(axis=1)
    terms = dict(zip(TERMS, run.parts[top].tolist(), strict=True))
    terms |= {
        "pipeline bubble": makespan + late - float(busy[top]) if layout.pp > 1 else 0.0,
        "data traffic": before + after - optimizer,
        "offload traffic": terms["offload traffic"] + ends.copies * optimizer,
        "optimizer": (1.0 - ends.copies) * optimizer,
        "host": step_s - pipeline,
    }
    return _Times(
        step_s,
        {name: value for name, value in terms.items() if value},
        busy - exposed,
        exposed,
        np.maximum(makespan + late - busy, 0.0),
    )
