"""Lower bounds of a group: all choices that run the same kernels, bounded at once.

Why
    Kernels of one size serve thousands of choices of stages, copies and recomputation. Evaluating
    each takes longer than pricing those that are any good.

What it relaxes (proofs: docs/predict/search.md)
    The bound is the largest of: all passes shared out evenly over ranks, for 1F1B with its bubble;
    one micro-batch through all stages and back; the mean rank, from the step's begin; and the
    fullest rank. Whatever the split, some rank of p holds ``ceil(layers / p)`` layers or more.
    Its passes, what it gathers and reduces beyond what they hide, and its part of the optimizer
    follow each other. Passes that hide traffic are left out, and what they hide counts whole, so it
    does not matter how long they really are.

    Modules that are computed again count with their FLOP at the devices' peak and the bytes that
    they move, shared out evenly, and the core with its kernels; the fullest rank's count nothing.

    Where layers are alike, no stage has more than ``q = ceil(layers / stages)``, D places are
    empty, and some rank holds v q layers with at least q (p - 1 - D) forwards before it. With each
    k-th layer recomputed and ``D >= 2``, a run of q layers has ``q // k`` or more that are.

    The weight of the ends is priced for the very tokens that layers are split for, with layers at
    their lightest (``plan.bounds.kernels``), so it is never underrated.

Kept true (tests/unit/plan/bounds/test_bounds.py, tests/unit/plan/bounds/test_group.py)
    No bound exceeds ``sim.step.price_step``; collectives never take less for more bytes, on which
    it rests.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Flags, Floats, Ints
from equipoise.cost.step.request import TERMS, element_bytes
from equipoise.plan.bounds.kernels import Passes
from equipoise.plan.bounds.pipeline import LESS
from equipoise.plan.bounds.roofline import bubble, module_bound_s
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import (
    RECOMPUTES,
    WHOLE_LAYERS,
    Space,
    group_equal,
    schedules_with,
)
from equipoise.sim.machine import Machine
from equipoise.sim.parameters import (
    SLOWDOWN,
    Held,
    gather_s,
    held_by_layer,
    optimizer_s,
    pass_traffic,
    reduce_s,
)
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.recompute import layer_recompute, repeats_core, repeats_layer

_ROUNDED_S = 2e-9
"""What replays in whole nanoseconds may lose of a micro-batch's three passes on a stage [s]."""

_WHOLE = schedules_with(lambda each: not each.splits_backward)
"""Schedules with whole backwards."""

_EVERY = [int(name.removeprefix("every-")) if "every" in name else 1 for name in WHOLE_LAYERS]
"""Period of the layers that are recomputed."""

_AS_WHOLE = np.array(
    [
        WHOLE_LAYERS.index(name)
        if name in WHOLE_LAYERS
        else WHOLE_LAYERS.index("attention" if repeats_core(name) else "none")
        for name in RECOMPUTES
    ]
)
"""By setting, the one of whole layers that takes no more: modules repeat the core, or nothing."""

_SHARES = ("tp", "cp", "ep", "etp", "pp", "dp", "zero", "replicas", "order", "offload")
"""Columns that say who shares weights and updates them."""

Travels = dict[tuple[int, ...], tuple[float, float, float, float, float]]
"""By layers and ``_SHARES``: gather, reduce and update once a step; forward and backward of a layer
with ZeRO 3 [s]."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layers:
    """Seconds of the lightest 0, 1, .. layers together, float64 [WHOLE_LAYERS, layers + 1]."""

    busy: Floats
    """All their passes."""
    without_last: Floats
    """All but one backward."""
    without_ends: Floats
    """All but one forward and one backward."""


def group_bound_s(
    model: ModelSpec,
    machine: Machine,
    space: Space,
    rows: Ints,
    passes: Passes,
    known: Travels | None,
    *,
    has_documents: bool,
) -> Floats:
    """The group's lower bound of each row's step, float64 [rows] [s].

    Args:
        model: Sizes.
        machine: Links and memory.
        space: The choices.
        rows: Choices that run these kernels, int64 [n].
        passes: Least passes without recomputation; of windows for any number of micro-batches.
        known: As of ``fullest_rank_bound_s``; None leaves that bound out.
        has_documents: Whether micro-batches differ.

    Cost: about 0.5 us a row.
    """
    pp, count = space["pp"][rows], space.micro_batches[rows]
    if has_documents:  # a packer may need more than there are windows
        count = np.full(len(rows), passes.counts.sum())
    mean = mean_rank_bound_s(model, space, rows, count, passes)
    modules = module_bound_s(model, machine, space, rows)
    even = passes.busy_s / passes.counts.sum() * count / pp + modules
    is_plain = np.isin(space["schedule"][rows], schedules_with(lambda each: each.is_plain))
    longer = np.where(is_plain & (not has_documents), bubble(pp, count), 1.0)
    least = np.maximum(np.maximum(even * longer, mean + modules), passes.once_s)
    if known is not None:
        fullest = fullest_rank_bound_s(model, machine, space, rows, count, passes, known)
        least = np.maximum(least, fullest)
    return np.asarray(least * LESS / (1.0 - space.base.residuals.step_share))


def fullest_rank_bound_s(
    model: ModelSpec,
    machine: Machine,
    space: Space,
    rows: Ints,
    counts: Ints,
    passes: Passes,
    known: Travels,
) -> Floats:
    """Lower bound by the fullest rank, float64 [rows] [s].

    Args:
        model: Sizes.
        machine: Links and memory.
        space: The choices.
        rows: Choices that run these kernels, int64 [n].
        counts: Micro-batches of each row, int64 [n].
        passes: Least passes without recomputation, of as many micro-batches, or all alike.
        known: Known traffic; is added to.

    Cost: some 0.1 ms for each new way to share weights out, and 0.5 us a row.
    """
    pp, virtual = space["pp"][rows], space["virtual"][rows]
    recompute = _AS_WHOLE[space["recompute"][rows]]
    layers, before, again = _shape(model, space, rows, passes)
    shares = counts / passes.counts.sum()
    busy, without_last, without_ends = np.empty((3, len(rows)))
    for share in np.unique(shares).tolist():
        here = shares == share
        lightest = _lightest(passes, share)
        place = recompute[here], layers[here]
        busy[here] = lightest.busy[place]
        without_last[here] = lightest.without_last[place]
        without_ends[here] = lightest.without_ends[place]
    busy += again * shares * (passes.counts @ (passes.layers[..., 0] - passes.spared)).min()
    below = passes.below.T[..., None]
    backward = (_backwards(passes) - below[1]).min(axis=(1, 2))[recompute]
    # With whole backwards, a micro-batch has to come back through all stages before.
    returns = np.isin(space["schedule"][rows], _WHOLE)
    begins = before * (passes.layers[..., 0] - below[0]).min()
    travels = np.empty((5, len(rows)))
    codes = [layers, *(space[name][rows] for name in _SHARES)]
    for alike in group_equal(codes):
        key = tuple(int(code[alike[0]]) for code in codes)
        if key not in known:
            choice = space.choice(int(rows[alike[0]]))
            once = least_travel_s(model, machine, choice, key[0])
            known[key] = *once, *_in_passes(model, machine, choice)
        travels[:, alike] = np.array(known[key])[:, None]
    gather, reduce, optimizer = travels[:3]
    for at, passing in enumerate(travels[3:]):
        if passing.any():  # computes: float64 [WHOLE_LAYERS, bins, layers]
            computes = _backwards(passes) if at else _forwards(passes)
            # What is not hidden is convex in the pass, so the mean of like ones is a bound.
            overlap, travel = space.base.stack.data_overlap, passing[:, None]
            most = computes.max(axis=2)[recompute] * overlap
            least = np.maximum(computes - below[at], 0.0).min(axis=2)[recompute] * overlap
            waits = np.maximum(travel - most, 0.0) + SLOWDOWN * np.minimum(travel, least)
            busy += layers * shares * (waits @ passes.counts)
    if space.base.stack.data_overlap and space.base.stack.stage_overlap:
        bound = begins + busy + optimizer
    elif space.base.stack.data_overlap:
        bound = begins + np.maximum(busy, without_last + reduce)
        bound = np.maximum(bound, gather + without_ends + reduce) + optimizer
    else:
        bound = gather + busy + reduce + optimizer
    bound = np.where(returns, np.maximum(bound, begins + busy + before * backward), bound)
    return np.asarray(bound - _ROUNDED_S * (counts * virtual + 4 * pp))


def mean_rank_bound_s(
    model: ModelSpec, space: Space, rows: Ints, counts: Ints, passes: Passes
) -> Floats:
    """Lower bound by the mean over ranks of waits and passes, float64 [rows] [s]."""
    pp, recompute = space["pp"][rows], _AS_WHOLE[space["recompute"][rows]]
    ends = (passes.first + passes.last).sum(axis=1)
    each = (_forwards(passes) + _backwards(passes)).sum(axis=2) + ends
    busy = (each @ passes.counts)[recompute] / passes.counts.sum() * counts / pp
    is_known, full, lacking = _stages(model, space, rows, passes)
    # Rank r follows r stages, of ``full r - lacking`` layers at least.
    first = np.minimum(-(-lacking // full), pp)
    before = (full * (first + pp - 1) / 2.0 - lacking) * (pp - first) / pp * is_known
    below = passes.below.T[..., None]
    forward = (passes.layers[..., 0] - below[0]).min()
    backward = (_backwards(passes) - below[1]).min(axis=(1, 2))[recompute]
    returns = np.isin(space["schedule"][rows], _WHOLE)
    bound = busy + before * (forward + returns * backward)
    return np.asarray(bound - _ROUNDED_S * (counts * space["virtual"][rows] + 4 * pp))


def _stages(model: ModelSpec, space: Space, rows: Ints, passes: Passes) -> tuple[Flags, Ints, Ints]:
    """Whether the most layers of a stage are known, that number, and what all lack together."""
    stages = space["pp"][rows] * space["virtual"][rows]
    full = -(-model.layers // stages)
    lacking = stages * full - model.layers
    if passes.lacks is None or len(_kinds(model)) > 1 or space.base.stack.split != "exact":
        return np.zeros(len(rows), dtype=bool), full, lacking
    is_mixed = np.array(_EVERY)[_AS_WHOLE[space["recompute"][rows]]] > 1
    is_light = passes.is_last_heavier is not None
    mixed_too = is_light & (lacking >= 2) & (space["offload"][rows] == 0)
    return np.where(is_mixed, mixed_too, lacking + 3 > passes.lacks), full, lacking


def _shape(model: ModelSpec, space: Space, rows: Ints, passes: Passes) -> tuple[Ints, Ints, Ints]:
    """Least layers of the fullest rank, of stages before it, and recomputed, int64 [rows]."""
    pp, virtual = space["pp"][rows], space["virtual"][rows]
    known, full, _ = _stages(model, space, rows, passes)
    layers, before = full_rank(model.layers, pp, virtual, passes.lacks or 0)
    known &= layers > 0
    every = np.array(_EVERY)[_AS_WHOLE[space["recompute"][rows]]]
    is_light = known & (every > 1) & (layers <= model.layers - model.layers // every)
    again = np.where(is_light, virtual * (full // every), 0)
    return np.where(known, layers, -(-model.layers // pp)), np.where(known, before, 0), again


def full_rank(layers: int, ranks: Ints, virtual: Ints, lacks: int) -> tuple[Ints, Ints]:
    """The rank that surely has as many layers as any (proof: docs/predict/search.md).

    Args:
        layers: Layers of the model, all alike.
        ranks: Ranks of pipelines, int64 [n].
        virtual: Stages of each rank, int64 [n].
        lacks: ``Passes.lacks``.

    Returns:
        Layers of that rank, and of the stages before its first at least, int64 [n]; 0 where none
        is sure.

    >>> layers, before = full_rank(30, np.array([4, 16]), np.array([1, 1]), 2)
    >>> layers.tolist(), before.tolist()
    ([8, 2], [8, 26])
    """
    each = -(-layers // (ranks * virtual))
    lacking = ranks * virtual * each - layers
    is_sure = (lacking < ranks) & (lacking + 3 > lacks)
    return virtual * each * is_sure, each * (ranks - 1 - lacking) * is_sure


def least_travel_s(
    model: ModelSpec, machine: Machine, choice: Choice, layers: int
) -> tuple[float, float, float]:
    """Seconds to gather, reduce and update some layers, each with as few weights as any."""
    layout, options = choice.layout, choice.options
    each = [held_by_layer(model, layout, sparse=kind) for kind in _kinds(model)]
    held = Held(layers * min(one.shared for one in each), layers * min(one.experts for one in each))
    optimizer = optimizer_s(machine, layout, held, options)
    if layout.zero == 3:  # layers travel in their passes
        return 0.0, 0.0, optimizer
    slow = options.residuals.traffic
    width = element_bytes(options.precision)
    gather = gather_s(machine, layout, held, width) * slow if layout.zero else 0.0
    return gather, reduce_s(machine, layout, held, options.stack.grad_bytes) * slow, optimizer


def _in_passes(model: ModelSpec, machine: Machine, choice: Choice) -> tuple[float, float]:
    """Traffic of a layer in forward and backward with ZeRO 3, as if nothing hid it [s]."""
    waits = []
    for kind in _kinds(model):
        parts = np.zeros((3, len(TERMS)))
        pass_traffic(parts, model, machine, choice.layout, choice.options, sparse=kind)
        waits.append(parts[:2].sum(axis=1))
    forward, backward = np.min(waits, axis=0).tolist()
    return forward, backward


def _kinds(model: ModelSpec) -> list[bool]:
    return sorted({model.is_sparse(layer) for layer in range(model.layers)})


def _lightest(passes: Passes, share: float) -> _Layers:
    """Seconds of the lightest layers, with a multiple of all bins' micro-batches."""
    linear, core = _repeats(len(passes.layers[0]))
    forward, attends = passes.layers[..., 0], passes.core
    backward, rest = passes.layers[..., 1:].sum(axis=2), forward - attends - passes.spared

    def whole(join: Callable[[Floats], Floats]) -> Floats:
        return join(backward) + linear * join(rest) + core * join(attends)

    counts = passes.counts * share
    busy = counts @ forward + whole(lambda table: counts @ table)
    # Where bins differ this may be more than any one backward: then less is left.
    above = passes.above.max(axis=0)
    without_last = busy - whole(lambda table: table.max(axis=0)) - above[1]
    without_ends = without_last - forward.max(axis=0) - above[0]
    each = np.sort(np.maximum((busy, without_last, without_ends), 0.0), axis=2)
    return _Layers(*np.cumsum(np.pad(each, ((0, 0), (0, 0), (1, 0))), axis=2))


def _forwards(passes: Passes) -> Floats:
    """Forwards under every setting, float64 [WHOLE_LAYERS, bins, layers] [s]."""
    return np.repeat(passes.layers[None, ..., 0], len(WHOLE_LAYERS), axis=0)


def _backwards(passes: Passes) -> Floats:
    """Both gradients and what is recomputed, float64 [WHOLE_LAYERS, bins, layers] [s]."""
    linear, core = _repeats(len(passes.layers[0]))
    products = passes.layers[..., 0] - passes.core - passes.spared
    again = linear[:, None] * products + core[:, None] * passes.core
    return np.asarray(passes.layers[..., 1:].sum(axis=2) + again)


@functools.cache
def _repeats(layers: int) -> tuple[Flags, Flags]:
    """Whether each setting recomputes a layer's products, and its core."""
    how = [[layer_recompute(each, layer) for layer in range(layers)] for each in WHOLE_LAYERS]
    linear, core = (
        np.array([[is_so(each) for each in every] for every in how])
        for is_so in (repeats_layer, repeats_core)
    )
    return linear, core
