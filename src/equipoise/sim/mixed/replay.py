"""Replay a step whose layers are not all laid out alike.

What it decides
    Nothing of its own: each layer is priced by ``sim.parts`` as if all were like it, what moves
    between neighbours is added where it arrives, and the pipeline is written and replayed as that
    of any step. Stages are cut as the base's are. Memory is ``sim.mixed.memory``'s. On a cluster of
    several classes each stage is priced on its own site (``sim.mixed.sites``), a hop between stages
    as the slowest of them.

Kept true (tests/unit/sim/mixed/test_layers.py)
    Layers that are all like the base price as ``sim.step`` does, in seconds and bytes.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from equipoise.balance.stage import StageSplit
from equipoise.base.arrays import Floats
from equipoise.base.errors import LayoutError
from equipoise.cost.offload import copies_share, require_host
from equipoise.cost.step.layer import add
from equipoise.cost.step.request import StepOptions, element_bytes
from equipoise.sim.divided import DividedStep, require_whole
from equipoise.sim.machine import Machine
from equipoise.sim.mixed.layers import LayerStrategy, redistribute_s, require_strategy
from equipoise.sim.mixed.memory import layered_memory
from equipoise.sim.mixed.sites import (
    SiteParts,
    name_sites,
    rank_of_stages,
    room_bytes,
    slowest_hop_s,
    split_by_speed,
)
from equipoise.sim.parameters import (
    Held,
    gather_s,
    held_by_ends,
    held_by_layer,
    moved_by_layer,
    optimizer_s,
    reduce_s,
)
from equipoise.sim.parts import BatchParts, PipelineRun, layers_of_ranks, run_pipeline, split_layers
from equipoise.sim.step import (
    Documents,
    Ends,
    Replayed,
    StepRun,
    add_up,
    rank_ends_s,
    require_stages,
    run_step,
    typical,
    uniform_documents,
)
from equipoise.sim.turns import fullest_turns, slowest_turns
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.recompute import layer_recompute


def run_sites(
    model: ModelSpec,
    machine: Machine,
    layout: Layout,
    options: StepOptions,
    *,
    documents: Documents | DividedStep | None = None,
    prices: SiteParts | None = None,
) -> StepRun:
    """Price one step, each stage on the devices on which it stands.

    On a cluster of one class, or without stages, that of ``sim.step.run_step``. ``prices`` are of
    choices of the same step that were priced before.

    Raises:
        LayoutError: as ``run_step``.
    """
    if len(machine.cluster.classes) == 1 or layout.pp == 1:
        parts = None if prices is None else prices.parts(machine, layout, options)
        run = run_step(model, machine, layout, options, documents=documents, parts=parts)
        return dataclasses.replace(run, sites=_sites(machine, layout))
    strategies = [
        LayerStrategy(
            layout,
            layer_recompute(options.recompute, layer),
            options.context_strategy,
        )
        for layer in range(model.layers)
    ]
    return run_layered(
        model, machine, layout, options, strategies, documents=documents, prices=prices
    )


def run_layered(
    model: ModelSpec,
    machine: Machine,
    layout: Layout,
    options: StepOptions,
    layers: Sequence[LayerStrategy],
    *,
    documents: Documents | DividedStep | None = None,
    prices: SiteParts | None = None,
) -> StepRun:
    """Price one step of layers with strategies of their own.

    Args:
        model: Sizes.
        machine: Device and links.
        layout: The base: by it stages are cut and hand over, and tables are held.
        options: Likewise.
        layers: Of every layer of the model.
        documents: As ``sim.step.run_step`` takes them.
        prices: Of choices of the same step that were priced before.

    Raises:
        LayoutError: strategies do not go together with the base, or with each other; documents
            are divided.

    Cost: that of ``run_step`` for each distinct strategy's kernels, and for one pipeline.
    """
    options.require()
    require_host(machine.device, options.offload)
    require_stages(model, layout, options)
    rows = uniform_documents(layout, options) if documents is None else require_whole(documents)
    for strategy in dict.fromkeys(layers):
        require_strategy(model, layout, options, strategy, has_documents=documents is not None)
    if len(layers) != model.layers:
        raise LayoutError(
            f"{len(layers)} strategies for a model of {model.layers} layers. Give each layer one."
        )
    known = prices or SiteParts(model, machine)
    step = _Step(model, machine, layout, options, tuple(layers), documents is None, known)
    split = step.split(typical(rows))
    runs, fullest = [], fullest_turns(layout, rows)
    for row in slowest_turns(model, layout, rows):
        batches = [step.price(np.asarray(batch), split) for batch in row]
        tokens = fullest or [int(sum(batch)) for batch in row]
        runs.append(run_pipeline(batches, split, layout, options, tokens=tokens))
    slowest = max(runs, key=lambda run: run.timeline.makespan_ns)
    held = layers_of_ranks(split, layout, options)
    capacities = room_bytes(machine.cluster, layout)
    memory = layered_memory(model, layout, options, layers, split, runs, capacities)
    ends = _ends(step, slowest, held)
    replayed = Replayed(rows, slowest, memory, ends, tuple(split.layers.tolist()))
    run = add_up(model, machine, layout, options, replayed)
    price = dataclasses.replace(run.price, capacities_bytes=capacities)
    return dataclasses.replace(run, price=price, sites=_sites(machine, layout))


def _sites(machine: Machine, layout: Layout) -> tuple[str, ...]:
    is_mixed = len(machine.cluster.classes) > 1
    return tuple(name_sites(machine.cluster, layout)) if is_mixed else ()


class _Step:
    """What is priced once for each strategy."""

    def __init__(
        self,
        model: ModelSpec,
        machine: Machine,
        layout: Layout,
        options: StepOptions,
        layers: tuple[LayerStrategy, ...],
        is_whole: bool,
        prices: SiteParts,
    ) -> None:
        self.model, self.machine = model, machine
        self.layout, self.options, self.layers = layout, options, layers
        self.is_whole = is_whole
        self.sites = prices.sites(layout)
        self.own = {each: each.options(layout, options) for each in layers}
        self._base = {id(site): prices.parts(site, layout, options) for site in self.sites}
        self._parts = {
            (id(site), each): prices.parts(site, each.layout, own)
            for site in {id(site): site for site in self.sites}.values()
            for each, own in self.own.items()
        }
        self._known: dict[bytes, BatchParts] = {}

    def split(self, doc_tokens: Floats) -> StageSplit:
        """Layers to stages, for a typical micro-batch."""
        layout, options = self.layout, self.options
        parts = [self._base[id(site)].price(doc_tokens) for site in self.sites]
        if len(self._base) > 1 and options.stack.split == "exact":
            return split_by_speed(parts, layout, options)
        return split_layers(parts[0], options, layout.pp * options.virtual)

    def price(self, doc_tokens: Floats, split: StageSplit) -> BatchParts:
        """One micro-batch, what moves between layers with it."""
        key = np.sort(doc_tokens).tobytes()
        if key not in self._known:
            self._known[key] = self._make(doc_tokens, split)
        return self._known[key]

    def _make(self, doc_tokens: Floats, split: StageSplit) -> BatchParts:
        layout, window = self.layout, self.options.context_tokens
        tables = {}
        for key, parts in self._parts.items():
            whole = np.full(self.own[key[1]].micro_batch, window)
            tables[key] = parts.price(whole if self.is_whole else doc_tokens).layers
        share = float(doc_tokens.sum()) / (layout.tp * layout.cp)
        place = rank_of_stages(layout, self.options)
        begins, stops = set(split.edges[:-1].tolist()), set((split.edges[1:] - 1).tolist())
        site_of = [self.sites[rank] for rank in np.repeat(place, split.layers).tolist()]
        layers = []
        for layer, (site, strategy) in enumerate(zip(site_of, self.layers, strict=True)):
            before = layout if layer in begins else self.layers[layer - 1].layout
            moved = self._moved(site, before, strategy.layout, share)
            if layer in stops:
                moved += self._moved(site, strategy.layout, layout, share)
            table = tables[id(site), strategy][layer]
            if moved:
                table = table.copy()
                add(table, 0, "redistribution", moved)
                add(table, 1, "redistribution", moved)
            layers.append(table)
        base = [self._base[id(self.sites[rank])].price(doc_tokens) for rank in place.tolist()]
        hop_s = slowest_hop_s(self.machine, layout, base[0], self.options.residuals.traffic)
        return BatchParts(tuple(layers), base[0].first, base[-1].last, hop_s)

    def _moved(self, site: Machine, before: Layout, after: Layout, tokens: float) -> float:
        slow = self.options.residuals.traffic
        return slow * redistribute_s(site, before, after, tokens, self.model.hidden)


def _ends(step: _Step, run: PipelineRun, held: list[list[int]]) -> Ends:
    """Gradients and parameters that travel once a step, each strategy's by itself."""
    model, layout, options = step.model, step.layout, step.options
    slow = options.residuals.traffic
    width, nothing = element_bytes(options.precision), Held(0.0, 0.0)
    before, after, optimizer = np.zeros((3, layout.pp))
    for rank, (mine, machine) in enumerate(zip(held, step.sites, strict=True)):
        tables = (rank == 0) + (rank == layout.pp - 1)
        tables -= model.tied and layout.pp == 1
        ends = Held(tables * held_by_ends(model, layout), 0.0)
        travels, owned = {layout: ends}, {layout: ends}
        for layer in mine:
            own, sparse = step.layers[layer].layout, model.is_sparse(layer)
            owned[own] = owned.get(own, nothing) + held_by_layer(model, own, sparse=sparse)
            once = moved_by_layer(model, own, options, sparse=sparse).once
            travels[own] = travels.get(own, nothing) + once
        gather = sum(
            gather_s(machine, own, each, width) for own, each in travels.items() if own.zero
        )
        reduce = sum(
            reduce_s(machine, own, weights, options.stack.grad_bytes)
            for own, weights in travels.items()
        )
        optimizer[rank] = sum(
            optimizer_s(machine, own, each, options) for own, each in owned.items()
        )
        again = sum(
            reduce_s(machine, own, weights, options.stack.grad_bytes)
            for own, weights in travels.items()
            if own.zero == 2
        )
        before[rank], after[rank] = rank_ends_s(
            run,
            rank,
            options.stack,
            slow * gather,
            slow * reduce,
            each_s=slow * again,
            layers=len(mine),
        )
    return Ends(before, after, optimizer, copies=copies_share(step.machine.device, options))
