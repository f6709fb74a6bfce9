"""What the fullest rank takes at least: many choices that run the same kernels at once.

Why
    Kernels of one size serve thousands of choices of stages, copies and recomputation. To look
    at each takes longer than to price those that are any good.

What it decides
    Whatever the split, some rank of p holds ``ceil(layers / p)`` layers or more. Its passes, what
    it gathers and reduces that they do not hide, and its part of the optimizer follow each other.
    Passes that hide are left out, and what they hide counts whole, so it does not matter how long
    they really are. What is computed again is the forward, or its core, or all but that.

    Where layers are alike ``balance.stage`` gives one after the other to the least loaded stage.
    So of S stages all have ``q = ceil(layers / S)`` but for ``D = S q - layers`` that lack one, as
    long as the ends weigh little. Of ranks from the last down, one of D + 1 lacks none; before it
    begins, a micro-batch has passed all stages before it::

        rank p - 1 - D   q f (p - 1 - D), and v q layers

Kept true (tests/unit/plan/test_bound.py, tests/unit/plan/test_fullest.py)
    The bound never exceeds ``sim.step.price_step``; collectives never take less for more bytes,
    on which it rests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.cost.step import Floats
from equipoise.plan.choice import Choice
from equipoise.plan.family import Passes
from equipoise.plan.space import RECOMPUTES, SCHEDULES, Ints, Space
from equipoise.sim.machine import Machine
from equipoise.sim.parameters import Held, gather_s, held_by_layer, optimizer_s, reduce_s
from equipoise.spec.model import ModelSpec
from equipoise.spec.recompute import layer_recompute

_ROUNDED_S = 2e-9
"""Of a micro-batch on one stage, whose three passes are replayed in whole nanoseconds."""

_MARGIN = 2.0
"""On what ends weigh in layers: the micro-batch that layers are split for is in no bin's middle."""

_WHOLE = [SCHEDULES.index(name) for name in ("1f1b", "interleaved")]
"""Schedules of whole backwards on the way back."""

_SHARES = ("pp", "dp", "zero", "replicas", "order")
"""What says who shares weights."""


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
    model: ModelSpec, machine: Machine, space: Space, rows: Ints, passes: Passes
) -> Floats:
    """Time that each row takes at least, float64 [rows] [s].

    Args:
        model: Sizes.
        machine: Links and memory.
        space: The choices.
        rows: Of choices whose kernels these are, int64 [n].
        passes: Least passes without recomputation, of as many micro-batches as any row has, or
            all alike.

    Cost: some 0.1 ms for each way to share weights out, and 0.5 us a row.
    """
    pp, virtual, recompute = space["pp"][rows], space["virtual"][rows], space["recompute"][rows]
    counts = space.micro_batches[rows]
    layers, before = _shape(model, space, rows, passes)
    tables = [_with_repeats(model, passes, setting) for setting in range(len(RECOMPUTES))]
    busy, without_last, without_ends = np.empty((3, len(rows)))
    for count in np.unique(counts).tolist():
        here = counts == count
        lightest = _lightest(tables, passes.counts * (count / passes.counts.sum()))
        place = recompute[here], layers[here]
        busy[here] = lightest.busy[place]
        without_last[here] = lightest.without_last[place]
        without_ends[here] = lightest.without_ends[place]
    forward = passes.layers[..., 0].min()
    backward = np.array([table[..., 1:].sum(axis=2).min() for table in tables])[recompute]
    # Where backwards are whole, a micro-batch has to come back through all stages before.
    returns = np.isin(space["schedule"][rows], _WHOLE)
    begins = before * forward
    codes = np.stack([layers, *(space[name][rows] for name in _SHARES)])
    _, first, group = np.unique(codes, axis=1, return_index=True, return_inverse=True)
    travels = [
        least_travel(model, machine, space.choice(int(rows[at])), int(layers[at])) for at in first
    ]
    gather, reduce, optimizer = np.array(travels)[group.reshape(-1)].T
    if space.base.stack.data_overlap:
        found = begins + np.maximum(busy, without_last + reduce)
        found = np.maximum(found, gather + without_ends + reduce) + optimizer
    else:
        found = gather + busy + reduce + optimizer
    found = np.where(returns, np.maximum(found, begins + busy + before * backward), found)
    return np.asarray(found - _ROUNDED_S * (counts * virtual + 4 * pp))


def _shape(model: ModelSpec, space: Space, rows: Ints, passes: Passes) -> tuple[Ints, Ints]:
    """Layers that some rank has at least, and layers of the stages before it, int64 [rows]."""
    pp, virtual = space["pp"][rows], space["virtual"][rows]
    stages = pp * virtual
    each = -(-model.layers // stages)
    lacking = stages * each - model.layers
    lightest = passes.layers.sum(axis=2).min(axis=1)
    ends = (passes.first.sum(axis=1), passes.last.sum(axis=1))
    lacks = sum(1 + int(_MARGIN * float((end / lightest).max())) for end in ends)
    plain = [at for at, name in enumerate(RECOMPUTES) if not name.startswith("every")]
    known = np.isin(space["recompute"][rows], plain) & (lacking < pp) & (lacking + 3 > lacks)
    known &= (len(_kinds(model)) == 1) & (space.base.stack.split == "exact")
    layers = np.where(known, virtual * each, -(-model.layers // pp))
    return layers, np.where(known, each * (pp - 1 - lacking), 0)


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
    gather = gather_s(machine, layout, held, 2.0) * slow if layout.zero else 0.0
    return gather, reduce_s(machine, layout, held, options.stack.grad_bytes) * slow, optimizer


def _kinds(model: ModelSpec) -> list[bool]:
    return sorted({model.is_sparse(layer) for layer in range(model.layers)})


def _lightest(tables: Sequence[Floats], counts: Floats) -> _Layers:
    found: list[list[Floats]] = []
    for table in tables:
        whole = np.tensordot(counts, table.sum(axis=2), axes=1)
        without_last = whole - table[..., 1:].sum(axis=2).max(axis=0)
        without_ends = without_last - table[..., 0].max(axis=0)
        each = np.maximum(np.stack((whole, without_last, without_ends)), 0.0)
        found.append([np.concatenate(([0.0], np.cumsum(np.sort(row)))) for row in each])
    return _Layers(*np.array(found).swapaxes(0, 1))


def _with_repeats(model: ModelSpec, passes: Passes, setting: int) -> Floats:
    """Passes of every layer with what it computes again, as ``Passes.layers``."""
    how = [layer_recompute(RECOMPUTES[setting], layer) for layer in range(model.layers)]
    linear = np.array([each in ("full", "selective") for each in how])
    core = np.array([each in ("full", "attention") for each in how])
    table = passes.layers.copy()
    table[..., 1] += linear * (passes.layers[..., 0] - passes.core) + core * passes.core
    return table
