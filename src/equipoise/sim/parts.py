"""Seconds of every part of a step on one rank, and one data-parallel rank's pipeline.

What it decides
    A layer is priced once for each kind and each number of tokens; what differs between
    micro-batches of equal tokens is the attention core, by their documents. Recomputation runs
    in front of the gradient of the input. Layers are put on stages, and the stages' prices into
    the schedule that would run.

Kept true (tests/unit/sim/test_parts.py)
    Parts are never negative; layers of every split add up to the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from equipoise.balance.stage import StageSplit, split_stages
from equipoise.base.arrays import Floats, Ints
from equipoise.cost.offload import COPIES, add_copies, loads_without_copies
from equipoise.cost.step.again import left_out
from equipoise.cost.step.layer import LayerTraffic, add, price_layer, product_passes, wait_for_host
from equipoise.cost.step.modules import module_forward
from equipoise.cost.step.request import TERMS, StepOptions, element_bytes
from equipoise.cost.step.trained import cut_ends, cut_layers
from equipoise.cost.step.work import LayerWork, head_work, layer_work
from equipoise.schedule.attention.price import Links
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.strategies import place_stages, write_pipeline
from equipoise.sim.attention import AttentionCore, CoreTimes
from equipoise.sim.gangs import GangCore, TurnGang
from equipoise.sim.machine import Machine
from equipoise.sim.parameters import pass_traffic
from equipoise.sim.planned import PlannedPipeline
from equipoise.sim.settle.sharding import auto_price
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.recompute import layer_recompute, modules_of, repeats_core, repeats_layer

_MOST_SIZES = 8
"""Numbers of tokens for which layers of a gang's ranks are priced."""

_LOGIT_PASSES = (3.0, 3.0)
"""Times that forward and backward of the loss read or write the logits in fp32."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchParts:
    """One micro-batch's seconds by pass and term, float64 [PASSES, TERMS], on one rank."""

    layers: tuple[Floats, ...]
    """Every layer of the model."""
    first: Floats
    """Embedding."""
    last: Floats
    """Final norm, head and loss."""
    hop_s: float
    """One message to the next stage."""
    hop_bytes: float = 0.0
    """Its size, of one rank."""
    spared_s: tuple[float, ...] = ()
    """What of each layer's forward is not computed again; empty where there is no such thing."""


class Core(Protocol):
    """What prices the attention core of a micro-batch."""

    def price(self, doc_tokens: Floats) -> CoreTimes:
        """The core of one micro-batch's documents [tokens]."""


KindKey = tuple[float, bool, tuple[float, float] | None]
LayerKinds = dict[KindKey, tuple[Floats, Floats, LayerWork]]
"""A layer without its core and repeats, [PASSES, TERMS], what of it is not computed again,
[TERMS] [s], and its work; by its tokens, whether it has experts, and its core if their rows travel
beside it."""


class StepParts:
    """Prices micro-batches of one setting; each distinct one once."""

    def __init__(
        self,
        model: ModelSpec,
        machine: Machine,
        layout: Layout,
        options: StepOptions,
        *,
        core: Core | None = None,
        kinds: LayerKinds | None = None,
    ) -> None:
        """What a setting's micro-batches are priced by.

        Args:
            model: Sizes.
            machine: Device and links.
            layout: Degrees.
            options: Everything else.
            core: The attention core; the layout's own unless given.
            kinds: Layers without their core that were priced before, of a layout with the same
                groups for tensors and experts and the same ZeRO of 3 or less; is added to.
        """
        machine = machine.at(options.precision)
        self._model, self._machine = model, machine
        self._width = element_bytes(options.precision)
        self._layout, self._options = layout, options
        if core is None:
            links = machine.context_links(layout)
            price = auto_price(model, machine, layout, options)
            core = AttentionCore(model, layout, options, machine, links, price=price)
        self._core = core
        self._known: dict[bytes, BatchParts] = {}
        self._kinds = {} if kinds is None else kinds
        every = range(model.layers)
        of_layer = [(model.is_sparse(at), layer_recompute(options.recompute, at)) for at in every]
        self._distinct = list(dict.fromkeys(of_layer))
        self._kind_of = [self._distinct.index(kind) for kind in of_layer]
        ranks = tuple(layout.group_of(0, "tp"))
        experts = tuple(layout.group_of(0, "ep"))
        self._traffic = LayerTraffic(
            machine.collective(ranks) if layout.tp > 1 else None,
            machine.collective(experts) if layout.ep > 1 else None,
            machine.collective(tuple(layout.group_of(0, "etp"))) if layout.etp > 1 else None,
            machine.expert_routes(experts, model.most_nodes),
        )
        self._next = layout.rank_at(pp=min(1, layout.pp - 1))
        self._links: Links | None = None
        self._gangs: dict[TurnGang, BatchParts] = {}

    def price(self, doc_tokens: Floats) -> BatchParts:
        """One micro-batch's documents [tokens]."""
        key = np.sort(np.asarray(doc_tokens, dtype=np.int64)).tobytes()
        if key not in self._known:
            self._known[key] = self._make(doc_tokens)
        return self._known[key]

    def price_slices(self, doc_tokens: Ints, pairs: Ints) -> BatchParts:
        """One micro-batch whose pieces read earlier ones of the same rank.

        Args:
            doc_tokens: Length of each piece, int64 [pieces].
            pairs: Of each tile of a piece and an earlier one of its document, int64 [tiles].
        """
        if not len(pairs):
            return self.price(doc_tokens.astype(np.float64))
        key = np.sort(doc_tokens).tobytes() + b"|" + np.sort(pairs).tobytes()
        if key not in self._known:
            core = self._attention.price_tiles(doc_tokens, pairs)
            self._known[key] = self._assemble([core] * len(self._distinct))
        return self._known[key]

    def price_gang(self, gang: TurnGang) -> BatchParts:
        """One turn of ranks that share documents: of the rank that ends each pass last.

        Cost: two replays of the gang's messages for each kind of layer.
        """
        if len(gang.ranks) == 1:
            return self.price(gang.doc_tokens.astype(np.float64))
        if gang not in self._gangs:
            self._gangs[gang] = self._make_gang(gang)
        return self._gangs[gang]

    def _make_gang(self, gang: TurnGang) -> BatchParts:
        if self._links is None:
            self._links = self._machine.data_links(self._layout)
        near, far = self._links.near, self._links.far
        node_of = tuple(self._links.node_of[rank] for rank in gang.ranks)
        core = self._attention.gang(gang, Links(near, far, node_of))
        return self._assemble([self._slowest(core, kind) for kind in self._distinct])

    @property
    def _attention(self) -> AttentionCore:
        if not isinstance(self._core, AttentionCore):
            raise TypeError("A core that is looked up has no divided documents.")
        return self._core

    def _slowest(self, core: GangCore, kind: tuple[bool, str]) -> CoreTimes:
        """The core of a gang's last rank in a layer of this kind, its waits for others with it."""
        tokens = core.gang.tokens
        forward, backward = self._beside_s(tokens, kind)
        computes, gradients = core.compute_s()
        ends = core.ends_s(forward)
        again = (ends - forward) * repeats_core(kind[1])
        returns = core.ends_s(backward + again, is_backward=True)
        last = int((ends + returns).argmax())
        own = CoreTimes(float(tokens[last]), float(computes[last]), float(gradients[last]), 0, 0)
        alone = self._layer(own, *kind).sum(axis=1)
        waits = max(0.0, float(ends.max() - alone[0]))
        repeated = waits if repeats_core(kind[1]) else 0.0
        late = max(0.0, float(returns.max() - alone[1:].sum()) - repeated)
        return replace(own, forward_exposed_s=waits, backward_exposed_s=late)

    def _beside_s(self, tokens: Ints, kind: tuple[bool, str]) -> tuple[Floats, Floats]:
        """Forward and backward of a layer without its core, float64 [ranks] [s]."""
        sizes = np.unique(tokens)
        if len(sizes) > _MOST_SIZES:  # between them a layer's kernels take their tokens' share
            sizes = sizes[np.linspace(0, len(sizes) - 1, _MOST_SIZES).astype(np.int64)]
        nothing = [self._layer(CoreTimes(float(size), 0, 0, 0, 0), *kind) for size in sizes]
        both = [(float(parts[0].sum()), float(parts[1:].sum())) for parts in nothing]
        forward, backward = np.array(both).T
        return np.interp(tokens, sizes, forward), np.interp(tokens, sizes, backward)

    def _make(self, doc_tokens: Floats) -> BatchParts:
        return self._assemble([self._core.price(doc_tokens)] * len(self._distinct))

    def _assemble(self, cores: Sequence[CoreTimes]) -> BatchParts:
        """A micro-batch, of the core that it has in layers of each kind."""
        model, layout = self._model, self._layout
        parts = list(zip(cores, self._distinct, strict=True))
        made = [self._layer(core, *kind) for core, kind in parts]
        core = max(cores, key=lambda each: each.tokens)
        beside = layout.tp if self._options.stack.sequence_parallel else 1
        size = core.tokens * model.hidden * self._width / beside
        senders = layout.world // layout.pp
        hop = 0.0
        if layout.pp > 1:
            hop = self._machine.hop_s(0, self._next, size, at_once=senders)
        hop *= self._options.residuals.traffic
        layers = cut_layers(tuple(made[kind] for kind in self._kind_of), self._options)
        first, last = cut_ends(self._first(core), self._last(core), self._options)
        spared = [float(self._kinds[self._key(each, kind[0])][1].sum()) for each, kind in parts]
        of_layers = tuple(spared[kind] for kind in self._kind_of) if any(spared) else ()
        return BatchParts(layers, first, last, hop, size, of_layers)

    def _key(self, core: CoreTimes, sparse: bool) -> KindKey:
        beside_layer = self._options.stack.dispatch_beside == "layer" and self._layout.ep > 1
        is_beside = sparse and (self._model.shortcut or beside_layer)
        return core.tokens, sparse, (core.forward_s, core.backward_s) if is_beside else None

    def _layer(self, core: CoreTimes, sparse: bool, recompute: str) -> Floats:
        known = self._key(core, sparse)
        if known not in self._kinds:
            stack = self._options.stack
            work = layer_work(
                self._model,
                self._layout,
                core.tokens,
                sparse=sparse,
                stack=stack,
                expert_skew=self._options.skew_of(self._layout),
                width=self._width,
            )
            machine, traffic = self._machine, self._traffic
            again = left_out(work.products, machine, self._layout, self._options, traffic)
            priced = price_layer(
                work,
                self._machine,
                self._layout,
                self._options,
                tokens=core.tokens,
                hidden=self._model.hidden,
                top_k=self._model.mean_top_k,
                traffic=self._traffic,
                width=self._width,
                core_s=known[2],
            )
            self._kinds[known] = priced, np.zeros_like(again) if sparse else again, work
        parts, spared, work = self._kinds[known]
        parts = parts.copy()
        attends = repeats_core(recompute)
        whole = wait_for_host(parts, work, self._options, core.passes_s, repeats_core=attends)
        beside = whole - spared
        add(parts, 0, "attention", core.forward_s)
        add(parts, 1, "attention", core.backward_s)
        add(parts, 0, "context traffic", core.forward_exposed_s)
        add(parts, 1, "context traffic", core.backward_exposed_s)
        if repeats_layer(recompute):
            parts[1] += beside
        if modules := modules_of(recompute):
            parts[1] += module_forward(
                *(modules, work, parts[0], self._model, self._machine, self._options),
                sparse=sparse,
            )
        if attends:
            add(parts, 1, "attention", core.forward_s)
            add(parts, 1, "context traffic", core.forward_exposed_s)
        pass_traffic(parts, self._model, self._machine, self._layout, self._options, sparse=sparse)
        device, kind = self._machine.device, (sparse, recompute)
        add_copies(parts, self._model, device, self._layout, self._options, kind, core.tokens)
        return parts

    def _first(self, core: CoreTimes) -> Floats:
        parts = np.zeros((3, len(TERMS)))
        moved = 2 * core.tokens * self._model.hidden * self._width / self._machine.bytes_per_s
        add(parts, 0, "element-wise", moved)
        add(parts, 2, "element-wise", 2 * moved)
        return parts

    def _last(self, core: CoreTimes) -> Floats:
        parts = np.zeros((3, len(TERMS)))
        rates, residuals = self._machine, self._options.residuals
        product = head_work(self._model, self._layout, core.tokens)
        for row, seconds in enumerate(product_passes(product, rates, self._options)):
            add(parts, row, "products", seconds * residuals.products)
        logits = 4.0 * product.rows * product.columns / rates.bytes_per_s * residuals.moves
        for row, passes in enumerate(_LOGIT_PASSES):
            add(parts, row, "element-wise", passes * logits)
        return parts


def split_layers(parts: BatchParts, options: StepOptions, stages: int) -> StageSplit:
    """Layers to stages, as the stack says: those that they would be in without offloading."""
    loads = loads_without_copies(parts.layers)
    if options.stack.split == "equal":
        bounds = np.round(np.linspace(0, len(loads), stages + 1)).astype(np.int64)
        return StageSplit(bounds, np.add.reduceat(loads, bounds[:-1]))
    first, last = float(parts.first.sum()), float(parts.last.sum())
    empty = stages > len(loads)
    return split_stages(loads, stages, first_load=first, last_load=last, empty_ends=empty)


@dataclass(frozen=True, eq=False)
class PipelineRun(PlannedPipeline):
    """One data-parallel rank's pipeline with what a described machine takes for it."""

    parts: Floats
    """Seconds by stage's rank and term, over all its instructions, float64 [pp, TERMS]."""
    last_backward_s: Floats
    """Backward of the last micro-batch through all stages of each rank, float64 [pp]."""
    first_forward_s: Floats
    """Forward of the first micro-batch, likewise."""
    tokens: tuple[int, ...]
    """Tokens of each micro-batch."""


def run_pipeline(
    batches: Sequence[BatchParts],
    split: StageSplit,
    layout: Layout,
    options: StepOptions,
    *,
    tokens: Sequence[int],
    units: Sequence[tuple[int, int]] | None = None,
) -> PipelineRun:
    """Write and replay one data-parallel rank's step.

    Args:
        batches: Its micro-batches, in order.
        split: Layers of every stage.
        layout: Degrees.
        options: Schedule.
        tokens: Tokens of each micro-batch.
        units: Runs of micro-batches that share documents over time; each alone unless given.
    """
    stages = split.stages
    table = _by_stage(batches, split)
    by_pass = 1e9 * table.sum(axis=3)
    sizes = {"stages": stages, "micro_batches": len(batches)}
    hop_ns = 1e9 * np.array([batch.hop_s for batch in batches])
    if not messages_overlap(options):  # the sender waits, and who receives has waited by then
        by_pass[:-1, :, 0] += hop_ns
        by_pass[1:, :, 1] += hop_ns
        hop_ns = np.zeros_like(hop_ns)
    prices = make_prices(*np.moveaxis(by_pass, 2, 0), hop_ns=hop_ns, **sizes)
    known, copies = prices, 1e9 * table[..., COPIES]
    if copies.any():  # in the order that it has without offloading, no wait makes a step faster
        known = make_prices(*np.moveaxis(by_pass - copies, 2, 0), hop_ns=hop_ns, **sizes)
    schedule = write_pipeline(options.schedule, known, ranks=layout.pp, units=units)
    place = place_stages(options.schedule, layout.pp, stages)
    parts = np.zeros((layout.pp, len(TERMS)))
    np.add.at(parts, place, table.sum(axis=(1, 2)))
    last, first = np.zeros(layout.pp), np.zeros(layout.pp)
    np.add.at(last, place, 1e-9 * by_pass[:, -1, 1:].sum(axis=1))
    np.add.at(first, place, 1e-9 * by_pass[:, 0, 0])
    return PipelineRun(schedule, prices, parts, last, first, tuple(tokens))


def messages_overlap(options: StepOptions) -> bool:
    """Whether messages between stages travel beside computing."""
    where = options.stack.message_overlap
    is_interleaved = SCHEDULES[options.schedule].is_interleaved
    return where == "all" or (where == "interleaved" and is_interleaved)


def _by_stage(batches: Sequence[BatchParts], split: StageSplit) -> Floats:
    """Parts of every stage and micro-batch, float64 [stages, micro-batches, 3, TERMS]."""
    distinct = {id(batch): batch for batch in batches}
    stage_of = np.repeat(np.arange(split.stages), split.layers)
    rows = np.empty((split.stages, len(distinct), 3, len(TERMS)))
    for at, batch in enumerate(distinct.values()):
        kinds = {id(layer): layer for layer in batch.layers}
        if len(kinds) == 1:
            rows[:, at] = np.multiply.outer(split.layers, batch.layers[0])
            continue
        number = {kind: place for place, kind in enumerate(kinds)}
        counts = np.zeros((split.stages, len(kinds)))
        kind_of = np.array([number[id(layer)] for layer in batch.layers])
        np.add.at(counts, (stage_of, kind_of), 1.0)
        rows[:, at] = np.tensordot(counts, np.stack(list(kinds.values())), axes=1)
    rows[0] += [batch.first for batch in distinct.values()]
    rows[-1] += [batch.last for batch in distinct.values()]
    place_of = {key: at for at, key in enumerate(distinct)}
    return np.asarray(rows[:, [place_of[id(batch)] for batch in batches]])


def layers_of_ranks(split: StageSplit, layout: Layout, options: StepOptions) -> list[list[int]]:
    """Numbers of the layers that each pipeline rank holds, over all its stages."""
    return split.layers_of(place_stages(options.schedule, layout.pp, split.stages))
