"""A step's parts on this machine, from what ``equipoise calibrate RUN.toml`` timed of it.

Why
    Eager kernels, hooks of sharded weights and the interpreter share a core here, and gloo's
    threads take a share. Counted FLOP and bytes miss half of that; a step's own parts, timed
    where they run, hold all of it. Schedules, packs and attention's tiles are those that will run.

What it decides
    Whose times answer: those of the run's way of sharing a step, if this model was timed in it.
    Recomputation runs a forward's parts again in front of the gradient of the input. Ranks that
    meet inside each micro-batch (ZeRO 2 and 3) go at the pace of the slower one of each turn.
    Attention over context ranks is replayed tile by tile, and takes beside that what its calls
    and tiles were timed to cost the interpreter.

Kept true (tests/unit/sim/test_here.py)
    A step of a timed size costs its timed parts; terms add up; more layers, tokens or
    recomputation never make it faster; what was not timed is priced from kernels.
"""

import numpy as np

from equipoise.balance.context.plan import plan_context
from equipoise.base.arrays import Floats, Ints
from equipoise.cost.curve import LoadCurve
from equipoise.cost.curves.parts import Once, PartCurves, part_curves
from equipoise.cost.step.layer import add
from equipoise.cost.step.request import TERMS, StepOptions, element_bytes
from equipoise.cost.step.trained import cut_ends, cut_layers
from equipoise.schedule.attention.count import Wire
from equipoise.schedule.attention.price import (
    BACKWARD_OVER_FORWARD,
    LinkPrice,
    price_attention,
)
from equipoise.schedule.attention.schedule import AttentionSchedule
from equipoise.sim.machine import Machine
from equipoise.sim.parts import BatchParts
from equipoise.sim.settle.sharding import auto_price
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.device.parts import ContextPoint
from equipoise.spec.device.spec import Dtype
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.recompute import layer_recompute


def measured_parts(
    model: ModelSpec, machine: Machine, layout: Layout, options: StepOptions
) -> "MeasuredParts | None":
    """The timed parts of a setting; None if they were not timed."""
    if machine.device.curve_file is None or options.precision == "fp8":
        return None
    dtype: Dtype = "fp32" if options.precision == "fp32" else "bf16"
    curves = part_curves(machine.device, model, dtype, layout)
    if curves is None:
        return None
    context = curves.context(options.context_strategy)
    if layout.cp > 1 and context is None:
        return None
    return MeasuredParts(model, machine, layout, options, curves, context)


class MeasuredParts:
    """Prices micro-batches of one setting, each distinct one once."""

    def __init__(
        self,
        model: ModelSpec,
        machine: Machine,
        layout: Layout,
        options: StepOptions,
        curves: PartCurves,
        context: ContextPoint | None,
    ) -> None:
        self._model, self._machine = model, machine
        self._layout, self._options = layout, options
        self._curves, self._context = curves, context
        self._halves = layout.pp > 1 and SCHEDULES[options.schedule].splits_backward
        self._known: dict[bytes, BatchParts] = {}

    def price(self, doc_tokens: Floats) -> BatchParts:
        """One micro-batch's documents [tokens]."""
        lengths = np.asarray(doc_tokens, dtype=np.int64)
        key = np.sort(lengths).tobytes()
        if key not in self._known:
            self._known[key] = self._make(lengths)
        return self._known[key]

    def ends(self, layers: list[list[int]]) -> tuple[Floats, Floats, Floats, float]:
        """What each stage's rank pays once: before, after, optimizer, float64 [pp]; and a step."""
        last = len(layers) - 1
        kinds: tuple[Once, ...] = ("gather_s", "reduce_s", "optimizer_s")
        trained = self._options.trained

        def once_s(kind: Once, rank: int) -> float:
            first, head, mine = float(rank == 0), float(rank == last), layers[rank]
            if trained is None or kind == "gather_s":
                return self._curves.once_s(kind, len(mine), first=first, last=head)
            held = sum(trained.layers[at] for at in mine)
            return self._curves.once_s(
                kind, held, first=first * trained.first, last=head * trained.last
            )

        before, after, optimizer = (
            np.array([once_s(kind, rank) for rank in range(len(layers))]) for kind in kinds
        )
        return before, after, optimizer, self._curves.way.step_s.mid

    def _make(self, lengths: Ints) -> BatchParts:
        model, layout, options = self._model, self._layout, self._options
        tokens, core = float(lengths.sum()), np.zeros((2, 2))
        if layout.cp == 1:
            for row, curve in enumerate((self._curves.forward, self._curves.backward)):
                core[row, 0] = 1e-9 * float(_documents_ns(curve, lengths).sum())
        else:
            tokens, core = self._share(lengths)
        if self._curves.is_beyond(tokens):
            self._machine.extrapolated.add("parts of a step")
        layers = []
        made: dict[str, Floats] = {}
        for layer in range(model.layers):
            kind = layer_recompute(options.recompute, layer)
            if kind not in made:
                made[kind] = self._layer(tokens, core, kind)
            layers.append(made[kind])
        first, last = np.zeros((2, 3, len(TERMS)))
        first[:, 0] = self._curves.passes_s("first", tokens, halves=self._halves)
        last[:, 0] = self._curves.passes_s("last", tokens, halves=self._halves)
        first, last = cut_ends(first, last, options)
        return BatchParts(cut_layers(tuple(layers), options), first, last, self._hop_s(tokens))

    def _hop_s(self, tokens: float) -> float:
        if self._layout.pp == 1:
            return 0.0
        size = tokens * self._model.hidden * element_bytes(self._options.precision)
        return self._machine.hop_s(0, self._layout.rank_at(pp=1), size)

    def _layer(self, tokens: float, core: Floats, recompute: str) -> Floats:
        """One layer; ``core`` has seconds of computing and of waiting, forward and backward."""
        parts = np.zeros((3, len(TERMS)))
        parts[:, 0] = self._curves.passes_s("layer", tokens, halves=self._halves)
        beside = float(parts[0, 0])
        for row in (0, 1):
            add(parts, row, "attention", float(core[row, 0]))
            add(parts, row, "context traffic", float(core[row, 1]))
        if recompute in ("full", "selective"):
            add(parts, 1, "products", beside)
        if recompute in ("full", "attention"):
            add(parts, 1, "attention", float(core[0, 0]))
            add(parts, 1, "context traffic", float(core[0, 1]))
        if recompute == "attention":
            add(parts, 1, "products", beside * self._output_share)
        return parts

    @property
    def _output_share(self) -> float:
        """The share of a layer's products that follows the core."""
        model = self._model
        return model.heads * model.head_width * model.hidden / model.layer_matmul_params

    def _share(self, lengths: Ints) -> tuple[float, Floats]:
        """Tokens of the rank that has most; seconds of computing and of the rest, two passes."""
        model, options = self._model, self._options
        plan = plan_context(
            lengths.tolist(),
            self._layout.cp,
            options.context_strategy,
            heads=model.heads,
            kv_heads=model.kv_heads,
            sharding=options.sharding,
            ranks_per_node=self._layout.cp,
            price=auto_price(model, self._machine, self._layout, options),
        )
        link = self._machine.context_links(self._layout).near
        wire = Wire(model.head_width, element_bytes(options.precision))
        core = replay_core(plan.schedule, self._curves.forward, self._curves.backward, link, wire)
        tiles = count_tiles(plan.schedule)
        extra = self._context
        if extra is not None:
            core[0, 1] += extra.forward_call_s + extra.forward_tile_s * tiles
            core[1, 1] += extra.backward_call_s + extra.backward_tile_s * tiles
        return float(max(map(len, plan.shares.rows))), core


def _documents_ns(curve: LoadCurve, lengths: Ints) -> Floats:
    return curve.attention_ns(lengths * (lengths + 1) / 2)


def count_tiles(schedule: AttentionSchedule) -> int:
    """Tiles of the rank that has most."""
    return max((sum(len(each.tiles) for each in rounds) for rounds in schedule.rounds), default=0)


def replay_core(
    schedule: AttentionSchedule,
    forward: LoadCurve,
    backward: LoadCurve,
    link: LinkPrice,
    wire: Wire,
) -> Floats:
    """Seconds of tiles on the rank that has most of them, and of waiting, float64 [2 passes, 2].

    Args:
        schedule: Of one layer.
        forward: A document's core, all heads of a rank of the schedule.
        backward: Likewise.
        link: Between its ranks.
        wire: Sizes of what travels.
    """
    core = np.zeros((2, 2))
    for row, curve in enumerate((forward, backward)):
        # A replay's backward is a fixed multiple of its tiles; these were timed themselves.
        scale = 1.0 if row == 0 else 1.0 / BACKWARD_OVER_FORWARD

        def tile_ns(
            pairs: Floats, _: Ints, curve: LoadCurve = curve, scale: float = scale
        ) -> Floats:
            return scale * curve.attention_ns(pairs)

        priced = price_attention(schedule, tile_ns, link, wire)
        whole = (priced.forward, priced.backward)[row]
        compute = float(whole.compute_ns.sum(axis=1).max(initial=0.0)) * 1e-9
        core[row] = compute, max(0.0, float(whole.ends_ns.max(initial=0.0)) * 1e-9 - compute)
    return core
