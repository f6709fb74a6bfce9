"""The price by which ``auto`` chooses context splits, on a measured or a described cluster.

Why
    A run, its simulation and its plan must choose alike, so they ask here, and all by the same
    machine: the one that the step is priced on.

What it decides
    Speed is that of attention over a document of a whole window; links are those between the
    ranks of a context group. On this machine a tile takes what ``equipoise calibrate RUN.toml``
    timed, or a guess. A run keeps what it began with: a later calibration changes no choice of a
    run that is resumed.

Kept true (tests/unit/sim/settle/test_sharding.py)
    A run and its simulation choose by the same price; a kept one is taken up again.
"""

from pathlib import Path

import numpy as np

from equipoise.balance.context.price import TILE_S, ContextPrice
from equipoise.balance.context.sharding import AUTO
from equipoise.balance.tiles import TILE
from equipoise.base.errors import SpecError
from equipoise.cost.curves.parts import part_curves
from equipoise.cost.step.request import StepOptions, element_bytes
from equipoise.cost.work import causal_pairs
from equipoise.schedule.attention.price import LinkPrice
from equipoise.schedule.attention.score import AssumedMachine
from equipoise.sim.machine import Machine
from equipoise.spec.cluster.spec import ClusterSpec, find_cluster, this_machine
from equipoise.spec.device.by_name import THIS_CPU, Dtype
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.resolved import ContextMachine, read_resolved
from equipoise.spec.run.spec import RunSpec

_CPU_TILE_S = 35e-6
"""A tile of one token by ``nn.tile`` on a core of a Xeon at 2.1 GHz, torch 2.13 [s]."""


def auto_price(
    model: ModelSpec, machine: Machine, layout: Layout, options: StepOptions
) -> ContextPrice | None:
    """``context_price``, or None if ``auto`` has nothing to choose."""
    is_asked = options.sharding == AUTO and layout.cp > 1
    return context_price(model, machine, layout, options) if is_asked else None


def context_price(
    model: ModelSpec, machine: Machine, layout: Layout, options: StepOptions
) -> ContextPrice:
    """The price by which ``auto`` chooses under these options.

    Args:
        model: Its heads are shared by ``layout.tp`` ranks.
        machine: What the step is priced on.
        layout: Where the context ranks stand.
        options: Window, precision, and what moves between ranks.
    """
    machine = machine.at(options.precision)
    window = np.array([options.context_tokens])
    seconds = machine.attention_s(
        window.astype(np.float64),
        model.heads,
        model.kv_heads,
        model.head_width,
        backward=False,
        score_width=model.score_width,
    )
    flop = 2 * (model.score_width + model.head_width) * model.heads * int(causal_pairs(window)[0])
    links = machine.context_links(layout)
    is_here = machine.device.name == THIS_CPU
    assumed = AssumedMachine(
        flop / float(seconds[0]),
        links.far or links.near,
        links.near if links.far else None,
        links.ranks_per_node,
        block=1 if is_here else TILE,
        tile_s=_cpu_tile_s(model, machine, layout, options) if is_here else TILE_S,
    )
    bits = 8 * int(element_bytes(options.precision))
    return ContextPrice.on(
        assumed, model, strategy=options.context_strategy, tensor=layout.tp, bits=bits
    )


def _cpu_tile_s(model: ModelSpec, machine: Machine, layout: Layout, options: StepOptions) -> float:
    dtype: Dtype = "fp32" if options.precision == "fp32" else "bf16"
    curves = part_curves(machine.device, model, dtype, layout)
    timed = None if curves is None else curves.context(options.context_strategy)
    return _CPU_TILE_S if timed is None else timed.forward_tile_s


def settle_machine(
    spec: RunSpec, model: ModelSpec, ranks: int, folder: Path
) -> ContextMachine | None:
    """The price by which a run's ``auto`` chooses; None if it has nothing to choose.

    Args:
        spec: The run.
        model: Its sizes.
        ranks: All of them.
        folder: The run's; where it has begun, it keeps what it began with.
    """
    layout, train = spec.layout, spec.train
    if layout.sharding != AUTO or layout.cp == 1:
        return None
    try:
        begun = read_resolved(folder)
    except SpecError:
        begun = None
    if begun is not None and begun.context_machine is not None and begun.model == model:
        return begun.context_machine
    options = StepOptions(
        spec.pack.context_tokens,
        1,
        precision=train.precision,
        context_strategy=layout.strategy,
    )
    machine = Machine(own_machine(ranks), train.precision)
    assumed = context_price(model, machine, layout.of_ranks(ranks), options).machine
    link = assumed.link
    return ContextMachine(assumed.flop_per_s, assumed.tile_s, link.latency_s, link.bytes_per_s)


def own_machine(ranks: int) -> ClusterSpec:
    """This machine; its cores, where its devices were not measured or are of several machines."""
    try:
        return this_machine(ranks)
    except SpecError:
        return find_cluster(f"{THIS_CPU}:{ranks}")


def run_price(
    settled: ContextMachine | None, spec: RunSpec, model: ModelSpec
) -> ContextPrice | None:
    """The price by which every rank of a run chooses."""
    if settled is None:
        return None
    assumed = AssumedMachine(
        settled.flop_per_s,
        LinkPrice(settled.latency_s, settled.bytes_per_s),
        tile_s=settled.tile_s,
    )
    bits = 8 * int(element_bytes(spec.train.precision))
    layout = spec.layout
    return ContextPrice.on(assumed, model, strategy=layout.strategy, tensor=layout.tp, bits=bits)
