"""The best and the next three, priced whole; and the smallest cluster if nothing fits.

What it decides
    Runners-up differ from the best and from each other in a degree, if enough choices do, else in
    another setting that a user would choose. One has a schedule that common programs run, if the
    best has not.
    With documents, each is priced on the pipelines that have most work; tokens and FLOP are
    those of all. On a cluster with measured pairs, nodes are placed for each, if that is faster.

Kept true (tests/unit/plan/answer/test_final.py)
    The first is the fastest; degrees differ; the smaller cluster does not fit.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial

import numpy as np

from equipoise.base.errors import EquipoiseError
from equipoise.cost.step.request import StepOptions
from equipoise.cost.step.work import published_flop
from equipoise.cost.work import layer_pairs, useful_flop
from equipoise.plan.bounds.roofline import needed_bytes
from equipoise.plan.layers.search import plan_layers
from equipoise.plan.search.deadline import NEVER, Deadline
from equipoise.plan.search.incumbent import Outcome
from equipoise.plan.search.place import Placement, place_nodes, placed
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.listing import list_space
from equipoise.sim.divided import DividedStep
from equipoise.sim.machine import Machine
from equipoise.sim.mixed.layers import LayerStrategy
from equipoise.sim.mixed.replay import run_layered, run_sites
from equipoise.sim.step import Documents, StepRun, price_step
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.cluster.spec import ClusterSpec, find_cluster
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.offload import Offload

_PIPELINES = 4
"""Pipelines that are priced if documents are packed."""
_MOST_DEVICES = 1 << 17
_TRIES = 6


@dataclass(frozen=True, slots=True, eq=False)
class Finalist:
    """A choice with its step."""

    choice: Choice
    run: StepRun
    nodes: tuple[int, ...] = ()
    """Node in each place; empty if nodes stand as given."""
    layers: tuple[LayerStrategy, ...] = ()
    """The strategy of each layer; empty if all follow the choice."""


def price_finalists(
    search: Search, outcome: Outcome, count: int = 4, due: Deadline = NEVER
) -> list[Finalist]:
    """The best and the next, fastest first.

    Args:
        search: What was searched.
        outcome: What the search found.
        count: How many, the best included.
        due: When pricing ends.
    """
    chosen: list[Choice] = []
    choices = [search.space.choice(each.row) for each in outcome.fitting]
    for choice in choices:
        if all(degrees_of(choice) != degrees_of(each) for each in chosen):
            chosen.append(choice)
    for choice in choices:
        if all(settings_of(choice) != settings_of(each) for each in chosen):
            chosen.append(choice)
    common = next((each for each in choices if is_common(each)), None)
    if chosen and common is not None and not any(map(is_common, chosen[:count])):
        chosen.insert(count - 1, common)
    priced: list[Finalist] = []
    if chosen and due is not NEVER:  # soon: the search has priced its parts
        priced.append(_as_searched(search, chosen[0]))
    for at, choice in enumerate(chosen[:count]):
        whole = due.attempt(partial(price_choice, search, choice))
        if whole is None:
            break
        priced = [*priced[:at], whole]
    priced = [each for each in priced if each.run.price.fits] or priced[:1]
    return sorted(priced, key=lambda each: each.run.price.step_s)


def degrees_of(choice: Choice) -> tuple[int, ...]:
    """Degrees that distinguish a runner-up's layout."""
    layout = choice.layout
    return layout.tp, layout.cp, layout.pp, layout.dp, layout.ep, layout.etp


def is_common(choice: Choice) -> bool:
    """Whether Megatron-LM runs its schedule, and with it most programs."""
    return choice.layout.pp == 1 or SCHEDULES[choice.options.schedule].megatron is not None


def settings_of(choice: Choice) -> tuple[object, ...]:
    """What a user would choose between: degrees, ZeRO, micro-batch, schedule, recomputation.

    Not the order of ranks and what travels between context ranks, which follow from the rest.
    """
    layout, options = choice.layout, choice.options
    piped = (options.schedule, options.virtual) if layout.pp > 1 else ()
    shared = layout.zero, layout.replicas, options.micro_batch
    return (
        *degrees_of(choice),
        *shared,
        *piped,
        options.recompute,
        options.offload,
        options.policy,
    )


def price_choice(search: Search, choice: Choice) -> Finalist:
    """One choice, priced whole."""
    documents = search.documents(choice)
    run, nodes = _run(search, choice, search.machine.cluster), tuple[int, ...]()
    cluster = search.machine.cluster
    if cluster.node_bytes_per_s is not None and len(cluster.classes) == 1:
        placement = _place(search, choice, cluster)
        moved = _run(search, choice, placed(cluster, placement))
        if moved.price.step_s < run.price.step_s:
            run, nodes = moved, placement.nodes
    return Finalist(choice, _of_all(search, documents, run), nodes)


def _as_searched(search: Search, choice: Choice) -> Finalist:
    return Finalist(choice, _of_all(search, search.documents(choice), search.replay(choice)))


def _of_all(search: Search, documents: Documents | DividedStep, run: StepRun) -> StepRun:
    """Tokens and FLOP of all pipelines, although only some were replayed."""
    if search.packer is None:
        return run
    if isinstance(documents, DividedStep):
        every = documents.doc_tokens
    else:
        every = np.array([length for row in documents for batch in row for length in batch])
    tokens, pairs = int(every.sum()), layer_pairs(search.model, every)
    price = dataclasses.replace(
        run.price,
        tokens=tokens,
        useful_flop=float(useful_flop(search.model, tokens, pairs)),
        published_flop=published_flop(search.model, every),
    )
    return dataclasses.replace(run, price=price)


def with_layers(
    search: Search, outcome: Outcome, finalists: list[Finalist], due: Deadline = NEVER
) -> list[Finalist]:
    """Finalists, and before them a plan whose layers have strategies of their own, if faster.

    Args:
        search: What was searched.
        outcome: What the search found.
        finalists: Those with one strategy for all layers, fastest first.
        due: When planning ends.
    """
    plan = plan_layers(search, outcome, due)
    if plan is None:
        return finalists
    documents, choice = search.documents(plan.choice), plan.choice
    rows = search.estimates.packs.deciding(choice, _PIPELINES) if search.packer else None
    machine = Machine(search.machine.cluster)
    layout, options = choice.layout, choice.options
    of_all = search.model, machine, layout, options, plan.layers
    run = due.attempt(lambda: run_layered(*of_all, documents=rows)) or plan.run
    if not run.price.fits or run.price.step_s >= finalists[0].run.price.step_s:
        return finalists
    return [Finalist(choice, _of_all(search, documents, run), (), plan.layers), *finalists]


def _run(search: Search, choice: Choice, cluster: ClusterSpec) -> StepRun:
    """Replayed on a new machine, which remembers what was extrapolated for this choice alone."""
    rows = search.estimates.packs.deciding(choice, _PIPELINES)
    machine = Machine(cluster)
    return run_sites(search.model, machine, choice.layout, choice.options, documents=rows)


def _place(search: Search, choice: Choice, cluster: ClusterSpec) -> Placement:
    """Place nodes by the bytes that a micro-batch and a step pass between them."""
    layout, options, model = choice.layout, choice.options, search.model
    beside = layout.tp if options.stack.sequence_parallel else 1
    tokens = options.micro_batch * options.context_tokens / layout.cp
    held = model.params / (layout.tp * layout.pp)
    return place_nodes(
        cluster,
        layout,
        hop_bytes=2.0 * tokens * model.hidden / beside,
        ring_bytes=held * (options.stack.grad_bytes + 2.0),
        seed=options.seed,
    )


def smallest_cluster(
    model: ModelSpec, name: str, devices: int, base: StepOptions, *, offload: Offload = "none"
) -> int | None:
    """Devices of the smallest cluster of a kind that holds the model, by doubling.

    Args:
        model: Sizes.
        name: A shipped cluster's.
        devices: A number that is too small.
        base: The step.
        offload: What may be offloaded.

    Returns:
        None where no cluster up to 131,072 devices does, or none divides the step's sequences.
    """
    sparing: dict[str, int | str] = {"recompute": "full", "micro_batch": 1, "offload": offload}
    while devices < _MOST_DEVICES:
        devices *= 2
        machine = Machine(find_cluster(f"{name}:{devices}"))
        try:
            space = list_space(model, devices, base, fixed=sparing)
        except EquipoiseError:
            continue
        needs = needed_bytes(model, machine, space)
        for row in np.argsort(needs, kind="stable")[:_TRIES].tolist():
            if needs[row] > machine.capacity_bytes:
                break
            choice = space.choice(row)
            try:
                price = price_step(model, machine, choice.layout, choice.options)
            except EquipoiseError:
                continue
            if price.fits:
                return devices
    return None
