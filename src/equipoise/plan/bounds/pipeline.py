"""Lower bound of a family or a row: its pipeline's ranks, and what travels once a step.

Why
    Ranks compute two thirds of a step. They wait for stages before and after them, and for
    parameters and gradients, which a pipeline of few stages has most of. Bounds without that
    prune nothing that is close.

What it relaxes (proofs: docs/predict/search.md)
    The schedule to dependencies that every order has. Rank j takes at least::

        G + B + busy + max(R - h, least R) + O

        G   gathered parameters, beyond the first forward that hides them; of rank 0, which
            begins at once
        B   passes that come before its first; and that it waits for with nothing to run
        R   gradients that are reduced; h the last backward, which hides them; O the optimizer

    Where passes are bounds themselves they do not say what they hide: then the passes that hide
    are left out, and what travels counts whole.

Kept true (tests/unit/plan/bounds/test_bounds.py)
    The bound never exceeds ``sim.step.price_step``, whatever is chosen and however documents fall.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.balance.stage import StageSplit
from equipoise.base.arrays import Floats, Ints
from equipoise.plan.bounds.kernels import Passes
from equipoise.plan.bounds.roofline import bubble
from equipoise.plan.space.choice import Choice
from equipoise.schedule.pipeline.strategies import place_stages
from equipoise.sim.machine import Machine
from equipoise.sim.parameters import Travel, travel_of
from equipoise.sim.parts import layers_of_ranks
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.model.presets import ModelSpec

LESS = 1.0 - 1e-9
"""Room for sums in another order."""


def pipeline_bound_s(
    model: ModelSpec, machine: Machine, choice: Choice, passes: Passes, micro_batches: int
) -> float:
    """Lower bound of a step's time [s].

    Args:
        model: Sizes.
        machine: Links.
        choice: Layout and options.
        passes: Those of any of its data-parallel ranks.
        micro_batches: Micro-batches of that rank.

    Cost: some 0.2 ms.
    """
    layout, options = choice.layout, choice.options
    span = passes.busy_s / layout.pp
    if SCHEDULES[options.schedule].is_plain and passes.is_alike:
        span *= float(bubble(layout.pp, micro_batches))
    split = passes.split(options, layout.pp * options.virtual)
    if split is not None:
        held = layers_of_ranks(split, layout, options)
        travel = travel_of(model, machine, layout, options, held)
        ranks = _ranks(choice, passes, split, micro_batches)
        span = max(span, _with_travel(choice, passes, ranks, travel, span))
    span -= rounding_s(micro_batches * options.virtual, layout.pp)
    return LESS * span / (1.0 - options.residuals.step_share)


def rounding_s(instructions: int, ranks: int) -> float:
    """What replays in whole nanoseconds may lose, by forwards of each rank [s]."""
    return 1e-9 * (2 * instructions + 4 * ranks)


@dataclass(frozen=True, slots=True, eq=False)
class _Ranks:
    """Seconds of each pipeline rank, float64 [pp]."""

    begins: Floats
    """Its least wait, before its first pass or later."""
    busy: Floats
    """Its own passes."""
    makespan_s: float
    """When all have ended, at the earliest."""
    first_forward: Floats
    """The longest of any one micro-batch on all its stages; by exact passes or by bounds."""
    last_backward: Floats


def _ranks(choice: Choice, passes: Passes, split: StageSplit, micro_batches: int) -> _Ranks:
    layout, options = choice.layout, choice.options
    table = np.add.reduceat(passes.layers, split.edges[:-1], axis=1)
    table[:, 0] += passes.first
    table[:, -1] += passes.last
    # A single micro-batch may differ from the mean of its bin.
    below, above = (each.T[..., None] * split.layers for each in (passes.below, passes.above))
    low = table.copy()
    low[..., 0] -= below[0]
    low[..., 1] -= below[1]
    least = low.min(axis=0)
    place = place_stages(options.schedule, layout.pp, split.stages)
    busy = _sum_by(place, layout.pp, np.tensordot(passes.counts, table.sum(axis=2), axes=1))
    forward = _sum_by(place, layout.pp, (table[..., 0] + above[0]).max(axis=0))
    backward = _sum_by(place, layout.pp, (table[..., 1:].sum(axis=2) + above[1]).max(axis=0))
    hops = passes.hop_s * np.arange(layout.pp)
    before = np.concatenate(([0.0], np.cumsum(least[: layout.pp - 1, 0]))) + hops
    if not SCHEDULES[options.schedule].splits_backward:
        back = least[: layout.pp - 1, 1:].sum(axis=1)
        after = np.concatenate(([0.0], np.cumsum(back))) + hops
        return _Ranks(before, busy, float((before + busy + after).max()), forward, backward)
    if options.virtual == 1 and passes.is_exact:
        # Forwards that a rank runs ahead hide a part of its wait for the first gradient.
        ahead = (layout.pp - 1 - np.arange(layout.pp)) * SCHEDULES[options.schedule].ahead
        ahead = np.minimum(ahead, micro_batches - 1)
        later = least[:, :2].sum(axis=1)
        downstream = later.sum() - np.cumsum(later) + 2 * hops[::-1]
        waits = downstream - ahead * table.max(axis=0)[:, 0]
        before = before + np.maximum(waits, 0.0)
    return _Ranks(before, busy, float((before + busy).max()), forward, backward)


def _sum_by(place: Ints, ranks: int, of_stage: Floats) -> Floats:
    return np.bincount(place, of_stage, minlength=ranks).astype(np.float64)


def _with_travel(
    choice: Choice, passes: Passes, ranks: _Ranks, travel: Travel, span: float
) -> float:
    """The whole step, from the first parameter that nothing hides to the last update."""
    options = choice.options
    overlaps = options.stack.data_overlap
    forward, backward = (each * overlaps for each in (ranks.first_forward, ranks.last_backward))
    if overlaps and options.stack.stage_overlap:  # a rank hides its travel behind all that it does
        forward = backward = np.full(choice.layout.pp, np.inf)
    share = 1.0 / np.maximum(travel.layers, 1)
    gathered, reduced = share * travel.gather_s, share * travel.reduce_s
    makespan = max(ranks.makespan_s, span)
    begin = float(gathered[0])
    if passes.is_exact or not overlaps:
        begin = max(begin, float(travel.gather_s[0] - forward[0]))
    ends = ranks.begins + ranks.busy + begin
    if not passes.is_exact:
        # A rank that begins late hides more: either it waits, or its parameters do.
        ends = np.maximum(ends, travel.gather_s - forward + ranks.busy)
    after = np.maximum(reduced, travel.reduce_s - backward) + travel.optimizer_s
    bound = max(begin + makespan, float((ends + after).max()))
    if not SCHEDULES[options.schedule].splits_backward:
        # Each micro-batch ends with its whole backward on the first rank.
        last = after[0] if passes.is_exact else reduced[0] + travel.optimizer_s[0]
        bound = max(bound, begin + makespan + float(last))
    return bound
