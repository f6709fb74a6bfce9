"""Lower bound of choices on several sites: what has to cross the link between them.

Why
    Where sites are far apart, a step takes what travels between them, and useful FLOP at the
    devices' peak say nothing about that. A lattice too large to list has only such bounds.

What it relaxes (proof: docs/predict/search.md)
    Everything but one term. Where all stages have ranks in several classes, some stage of
    ``ceil(layers / pp)`` layers reduces their gradients across, and gathers their weights. Where
    stages that follow each other stand in different classes, each micro-batch sends its activations
    across, one after the other. Other choices are bounded by nothing here.

Kept true (tests/unit/plan/bounds/test_across.py)
    The bound never exceeds ``sim.mixed.replay.run_sites``, whatever is chosen.
"""

import itertools
from collections.abc import Mapping

import numpy as np

from equipoise.base.arrays import Flags, Floats, Ints
from equipoise.cost.step.request import StepOptions, element_bytes
from equipoise.plan.bounds.pipeline import LESS
from equipoise.plan.bounds.roofline import layers_flop
from equipoise.plan.space.lattice import Lattice
from equipoise.sim.machine import Machine
from equipoise.sim.mixed.sites import stage_classes
from equipoise.sim.parameters import held_by_layer, moved_by_layer
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.layout import ORDERS, Layout
from equipoise.spec.model.presets import ModelSpec

_DEGREES = ("tp", "cp", "pp", "dp", "micro_batch", "micro_batches")
"""Columns of a lattice's cells on which the bound depends."""

_READ = ("tp", "cp", "pp", "dp", "micro_batches", "zero", "replicas")
"""And of choices."""


def least_across_s(model: ModelSpec, machine: Machine, lattice: Lattice) -> float:
    """The least bound of any choice of a lattice [s]; 0 where some choice has none."""
    table = np.stack([lattice.cells[name] for name in _DEGREES])
    cells = np.unique(table, axis=1)
    values = {
        name: np.unique(factor.values[name])
        for factor in lattice.factors
        for name in ("order", "zero", "replicas")
        if name in factor.names
    }
    # Of several copies of shards all that counts is that there are several.
    values["replicas"] = np.unique(np.minimum(values["replicas"], 2))
    least = np.inf
    for each in itertools.product(*(column.tolist() for column in values.values())):
        columns = dict(zip(_DEGREES, cells, strict=True))
        chosen = dict(zip(values, each, strict=True))
        kept = (columns["pp"] == 1) | (chosen["replicas"] == 1)
        columns = {name: column[kept] for name, column in columns.items()}
        columns |= {name: np.full(int(kept.sum()), value) for name, value in chosen.items()}
        bound = across_bound_s(model, machine, columns, lattice.base)
        least = min(least, float(bound.min(initial=np.inf)))
    return least


def across_bound_s(
    model: ModelSpec, machine: Machine, columns: Mapping[str, Ints], base: StepOptions
) -> Floats:
    """Lower bound of steps with full windows, float64 [rows] [s].

    Args:
        model: Sizes.
        machine: The cluster.
        columns: Degrees, micro-batches, order, ZeRO and its copies, int64 [rows] each.
        base: What no column says.

    Cost: some 0.1 ms for each way in which stages stand, and 0.1 us a row.
    """
    cluster, pp = machine.cluster, columns["pp"]
    bound = np.zeros(len(pp))
    sizes = {each.devices for each in cluster.classes}
    if len(cluster.classes) == 1 or cluster.between is None or len(sizes) > 1:
        return bound
    inner = np.where(_is_outer(columns["order"]), columns["dp"], 1)
    stride = columns["tp"] * columns["cp"] * inner
    (size,) = sizes
    is_whole = size % columns["tp"] == 0  # then ranks that share a product stand together
    rate = _port_bytes_per_s(cluster) * cluster.between.efficiency / base.residuals.traffic
    messages, share = _messages_bytes(model, columns, base), _share_s(model, machine, columns, base)
    for place in set(zip(stride.tolist(), pp.tolist(), strict=True)):
        here = is_whole & (stride == place[0]) & (pp == place[1])
        some = {name: columns[name][here] for name in _READ}
        touched = int(stage_classes(cluster, *place).sum(axis=1).min())
        if touched > 1:
            ranks = some["dp"] * some["cp"]
            crosses = _gradients_bytes(model, some, base, touched) / rate
            crosses *= touched / ranks * (1.0 - 1.0 / ranks)
            bound[here] = crosses + share[here]
        chain = cluster.class_of(np.arange(place[1]) * place[0])
        if (np.diff(chain) != 0).any():
            senders = some["tp"] * some["cp"] * some["dp"]
            at_once = np.minimum(senders, size) if cluster.trunk_bytes_per_s else size
            bound[here] = np.maximum(bound[here], messages[here] * at_once / size / rate)
    # Replays round each micro-batch's passes of a layer to whole nanoseconds.
    bound = np.maximum(0.0, bound * LESS - 1e-9 * model.layers * columns["micro_batches"])
    return np.asarray(bound / (1.0 - base.residuals.step_share))


def _is_outer(order: Ints) -> Flags:
    """Whether stages are outside data-parallel ranks in an order, bool [rows]."""
    outer = [axes.index("pp") < axes.index("dp") for axes in ORDERS.values()]
    return np.array(outer)[order] if len(order) else np.zeros(0, dtype=bool)


def _port_bytes_per_s(cluster: ClusterSpec) -> float:
    """The most that a device has of the link between classes while all of its class send."""
    between = cluster.between
    if between is None:
        return 0.0
    share = between.bytes_per_s / min(each.devices_per_node for each in cluster.classes)
    if cluster.trunk_bytes_per_s is None:
        return share
    return min(share, cluster.trunk_bytes_per_s / min(each.devices for each in cluster.classes))


def _share_s(
    model: ModelSpec, machine: Machine, columns: Mapping[str, Ints], base: StepOptions
) -> Floats:
    """What a stage of ``ceil(layers / pp)`` layers computes beside nothing that crosses [s].

    Of ZeRO 3 all forwards; else all micro-batches but one, whose passes hide what travels.
    """
    if len(_kinds(model)) > 1:
        return np.zeros(len(columns["pp"]))
    rate = max(
        Machine(machine.cluster, device=each.device).peak_flop_per_s(base.precision)
        for each in machine.cluster.classes
    )
    layers = np.ceil(model.layers / columns["pp"]) / model.layers
    ranks = columns["tp"] * columns["cp"] * columns["dp"]
    busy = layers_flop(model, base) * layers / ranks / rate
    hidden = 1.0 / columns["micro_batches"] if not base.stack.stage_overlap else 1.0
    return np.asarray(busy * np.where(columns["zero"] == 3, 1.0 / 3.0, 1.0 - hidden))


def _kinds(model: ModelSpec) -> list[bool]:
    return sorted({model.is_sparse(layer) for layer in range(model.layers)})


def _gradients_bytes(
    model: ModelSpec, columns: Mapping[str, Ints], base: StepOptions, touched: int
) -> Floats:
    """Bytes that the ranks of some stage reduce and gather, each its own, float64 [rows]."""
    held = min(held_by_layer(model, Layout(), sparse=kind).shared for kind in _kinds(model))
    weights = np.ceil(model.layers / columns["pp"]) * held / columns["tp"]
    width, grads = element_bytes(base.precision), base.stack.grad_bytes
    narrow = 1 if base.precision == "fp8" and base.stack.gather_fp8 else width
    each = np.where(columns["zero"] == 0, 2.0 * grads, width + grads)
    each = np.where(columns["zero"] == 3, narrow + grads, each)
    # Copies of shards add up over all classes; or shards cross, of half of the ranks at most.
    ranks = np.maximum(2.0, columns["dp"] * columns["cp"])
    crosses = (narrow + grads) * 4.0 * (1.0 - 2.0 / ranks) / (touched * (1.0 - 1.0 / ranks))
    few = np.minimum(crosses, 2.0 * grads * (1.0 - 1.0 / touched))
    each = np.where(columns["replicas"] > 1, few, each)
    return np.asarray(weights * each * _times(model, columns, base))


def _times(model: ModelSpec, columns: Mapping[str, Ints], base: StepOptions) -> Ints:
    """How often these travel in a step: of ZeRO 3 in each micro-batch, int64 [rows]."""
    often = np.zeros(len(columns["tp"]), dtype=bool)
    for tp in np.unique(columns["tp"]).tolist():
        shared = Layout(dp=2, tp=tp, zero=3)
        moved = [moved_by_layer(model, shared, base, sparse=kind) for kind in _kinds(model)]
        often |= (columns["tp"] == tp) & all(each.in_passes.shared > 0 for each in moved)
    return np.where((columns["zero"] == 3) & often, columns["micro_batches"], 1)


def _messages_bytes(model: ModelSpec, columns: Mapping[str, Ints], base: StepOptions) -> Floats:
    """Activations that a rank sends to the next stage in a step, at least, float64 [rows]."""
    beside = columns["tp"] if base.stack.sequence_parallel else 1
    tokens = columns["micro_batches"] * columns["micro_batch"] * base.context_tokens / columns["cp"]
    return np.asarray(tokens * model.hidden * element_bytes(base.precision) / beside)
