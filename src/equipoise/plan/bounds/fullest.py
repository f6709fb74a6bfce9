"""What the fullest rank takes at least: many choices that run the same kernels at once.

Why
    Kernels of one size serve thousands of choices of stages, copies and recomputation. To look
    at each takes longer than to price those that are any good.

What it decides
    Whatever the split, some rank of p holds ``ceil(layers / p)`` layers or more. Its passes, what
    it gathers and reduces that they do not hide, and its part of the optimizer follow each other.
    Passes that hide are left out, and what they hide counts whole, so it does not matter how long
    they really are. What is computed again is the forward, or its core, or all but that. Of ZeRO
    3 each layer's passes last at least as long as what they wait for travels.

    Where layers are alike ``balance.stage`` gives one after the other to the least loaded of S
    stages.
    With a the load of a layer and e, g those of the ends, no stage has more than
    ``q = ceil(layers / S)`` where ``D = S q - layers >= floor(e / a) + floor(g / a)``: when a stage
    took layer q + 1 it was the least loaded, so others had q of them already, or their end and all
    but ``floor(e / a)``. Then D places in all are empty. Let rank r be the last that lacks none;
    the ``p - 1 - r`` behind it lack one or more, so of ``q r`` layers before its first stage at
    most ``D - (p - 1 - r)`` are missing, and r is ``p - 1 - D`` or more::

        v q layers on rank r, and at least q (p - 1 - D) forwards before it begins

    Where each k-th layer runs again and ``D >= 2``, no stage has more than q either
    (``plan.bounds.memory``), and a run of q layers has ``q // k`` or more that do.

    How much ends weigh is priced for the very tokens that layers are split for, with layers at
    their lightest (``plan.bounds.family``), so it is never underrated.

Kept true (tests/unit/plan/bounds/test_choices.py, tests/unit/plan/bounds/test_fullest.py)
    The bound never exceeds ``sim.step.price_step``; collectives never take less for more bytes,
    on which it rests.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Flags, Floats, Ints
from equipoise.cost.step.request import TERMS, element_bytes
from equipoise.plan.bounds.family import Passes
from equipoise.plan.space.alike import group_alike
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import RECOMPUTES, Space, schedules_with
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
from equipoise.spec.recompute import layer_recompute

_ROUNDED_S = 2e-9
"""Of a micro-batch on one stage, whose three passes are replayed in whole nanoseconds."""

_WHOLE = schedules_with(lambda each: not each.splits_backward)
"""Schedules of whole backwards on the way back."""

_EVERY = [int(name.removeprefix("every-")) if "every" in name else 1 for name in RECOMPUTES]
"""Of how many layers one is not as the others."""

_SHARES = ("tp", "cp", "ep", "etp", "pp", "dp", "zero", "replicas", "order", "offload")
"""What says who shares weights, and updates them."""

Travels = dict[tuple[int, ...], tuple[float, float, float, float, float]]
"""By layers and ``_SHARES``: gather, reduce and update once a step; forward and backward of a layer
of ZeRO 3 [s]."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layers:
    """Of the lightest layers together, float64 [RECOMPUTES, layers + 1] [s]."""

    busy: Floats
    """All their passes."""
    without_last: Floats
    """All but one backward."""
    without_ends: Floats
    """All but one forward and one backward."""


def fullest_rank_s(
    model: ModelSpec,
    machine: Machine,
    space: Space,
    rows: Ints,
    counts: Ints,
    passes: Passes,
    known: Travels,
) -> Floats:
    """Time that each row takes at least, float64 [rows] [s].

    Args:
        model: Sizes.
        machine: Links and memory.
        space: The choices.
        rows: Of choices whose kernels these are, int64 [n].
        counts: Micro-batches of each row, int64 [n].
        passes: Least passes without recomputation, of as many micro-batches, or all alike.
        known: What travels, by layers and by who shares them; is added to.

    Cost: some 0.1 ms for each new way to share weights out, and 0.5 us a row.
    """
    pp, virtual, recompute = space["pp"][rows], space["virtual"][rows], space["recompute"][rows]
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
    busy += again * shares * (passes.counts @ passes.layers[..., 0]).min()
    below = passes.below.T[..., None]
    backward = (_backwards(passes) - below[1]).min(axis=(1, 2))[recompute]
    # Where backwards are whole, a micro-batch has to come back through all stages before.
    returns = np.isin(space["schedule"][rows], _WHOLE)
    begins = before * (passes.layers[..., 0] - below[0]).min()
    travels = np.empty((5, len(rows)))
    codes = [layers, *(space[name][rows] for name in _SHARES)]
    for alike in group_alike(codes):
        key = tuple(int(code[alike[0]]) for code in codes)
        if key not in known:
            choice = space.choice(int(rows[alike[0]]))
            once = least_travel(model, machine, choice, key[0])
            known[key] = *once, *_in_passes(model, machine, choice)
        travels[:, alike] = np.array(known[key])[:, None]
    gather, reduce, optimizer = travels[:3]
    for at, passing in enumerate(travels[3:]):
        if passing.any():  # computes: float64 [RECOMPUTES, bins, layers]
            computes = _backwards(passes) if at else _forwards(passes)
            # What is not hidden is convex in the pass, so the mean of those alike will do.
            overlap, travel = space.base.stack.data_overlap, passing[:, None]
            most = computes.max(axis=2)[recompute] * overlap
            least = np.maximum(computes - below[at], 0.0).min(axis=2)[recompute] * overlap
            waits = np.maximum(travel - most, 0.0) + SLOWDOWN * np.minimum(travel, least)
            busy += layers * shares * (waits @ passes.counts)
    if space.base.stack.data_overlap:
        found = begins + np.maximum(busy, without_last + reduce)
        found = np.maximum(found, gather + without_ends + reduce) + optimizer
    else:
        found = gather + busy + reduce + optimizer
    found = np.where(returns, np.maximum(found, begins + busy + before * backward), found)
    return np.asarray(found - _ROUNDED_S * (counts * virtual + 4 * pp))


def mean_rank_s(model: ModelSpec, space: Space, rows: Ints, counts: Ints, passes: Passes) -> Floats:
    """Time from a step's begin to its end of all ranks' mean, at least, float64 [rows] [s].

    Args:
        model: Sizes.
        space: The choices.
        rows: Of choices whose kernels these are, int64 [n].
        counts: Micro-batches of each row, int64 [n].
        passes: As of ``fullest_rank_s``.
    """
    pp, recompute = space["pp"][rows], space["recompute"][rows]
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
    found = busy + before * (forward + returns * backward)
    return np.asarray(found - _ROUNDED_S * (counts * space["virtual"][rows] + 4 * pp))


def _stages(model: ModelSpec, space: Space, rows: Ints, passes: Passes) -> tuple[Flags, Ints, Ints]:
    """Whether no stage has more than so many layers, and how many all lack together, [rows]."""
    stages = space["pp"][rows] * space["virtual"][rows]
    full = -(-model.layers // stages)
    lacking = stages * full - model.layers
    if passes.lacks is None or len(_kinds(model)) > 1 or space.base.stack.split != "exact":
        return np.zeros(len(rows), dtype=bool), full, lacking
    is_mixed = np.array(_EVERY)[space["recompute"][rows]] > 1
    is_light = passes.is_last_heavier is not None
    mixed_too = is_light & (lacking >= 2) & (space["offload"][rows] == 0)
    return np.where(is_mixed, mixed_too, lacking + 3 > passes.lacks), full, lacking


def _shape(model: ModelSpec, space: Space, rows: Ints, passes: Passes) -> tuple[Ints, Ints, Ints]:
    """Layers that some rank has at least, and layers of the stages before it, int64 [rows].

    And how many of them run again, where the lightest do not.
    """
    pp, virtual = space["pp"][rows], space["virtual"][rows]
    known, full, _ = _stages(model, space, rows, passes)
    layers, before = full_rank(model.layers, pp, virtual, passes.lacks or 0)
    known &= layers > 0
    every = np.array(_EVERY)[space["recompute"][rows]]
    is_light = known & (every > 1) & (layers <= model.layers - model.layers // every)
    again = np.where(is_light, virtual * (full // every), 0)
    return np.where(known, layers, -(-model.layers // pp)), np.where(known, before, 0), again


def full_rank(layers: int, ranks: Ints, virtual: Ints, lacks: int) -> tuple[Ints, Ints]:
    """A rank that surely has as many layers as any, as the module says.

    Args:
        layers: Of the model, all alike.
        ranks: Of pipelines, int64 [n].
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


def least_travel(
    model: ModelSpec, machine: Machine, choice: Choice, layers: int
) -> tuple[float, float, float]:
    """Gather, reduce and update so many layers, each with as few weights as any [s]."""
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
    """What a layer waits for in forward and backward of ZeRO 3, as if nothing hid it [s]."""
    found = []
    for kind in _kinds(model):
        parts = np.zeros((3, len(TERMS)))
        pass_traffic(parts, model, machine, choice.layout, choice.options, sparse=kind)
        found.append(parts[:2].sum(axis=1))
    forward, backward = np.min(found, axis=0).tolist()
    return forward, backward


def _kinds(model: ModelSpec) -> list[bool]:
    return sorted({model.is_sparse(layer) for layer in range(model.layers)})


def _lightest(passes: Passes, share: float) -> _Layers:
    """Of so many times the micro-batches of all bins."""
    linear, core = _repeats(len(passes.layers[0]))
    forward, attends = passes.layers[..., 0], passes.core
    backward, rest = passes.layers[..., 1:].sum(axis=2), forward - attends

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
    """Of every setting, float64 [RECOMPUTES, bins, layers]."""
    return np.repeat(passes.layers[None, ..., 0], len(RECOMPUTES), axis=0)


def _backwards(passes: Passes) -> Floats:
    """Both gradients and what is computed again, float64 [RECOMPUTES, bins, layers]."""
    linear, core = _repeats(len(passes.layers[0]))
    again = linear[:, None] * (passes.layers[..., 0] - passes.core) + core[:, None] * passes.core
    return np.asarray(passes.layers[..., 1:].sum(axis=2) + again)


@functools.cache
def _repeats(layers: int) -> tuple[Flags, Flags]:
    """Whether each setting computes a layer's products again, and its core."""
    how = [[layer_recompute(each, layer) for layer in range(layers)] for each in RECOMPUTES]
    return np.isin(how, ("full", "selective")), np.isin(how, ("full", "attention"))
