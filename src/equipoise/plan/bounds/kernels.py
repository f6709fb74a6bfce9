"""What choices that run the same kernels take at least, all at once.

What it decides
    The largest of four: all passes shared out evenly, for 1F1B with its bubble; one micro-batch
    through all stages and back; and ``plan.bounds.fullest``'s of the mean and of the fullest rank.

Kept true (tests/unit/plan/bounds/test_choices.py)
    The bound never exceeds ``sim.step.price_step``.
"""

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.plan.bounds.choices import bubble
from equipoise.plan.bounds.family import Passes
from equipoise.plan.bounds.fullest import Travels, fullest_rank_s, mean_rank_s
from equipoise.plan.bounds.step import LESS
from equipoise.plan.space.columns import Space, schedules_with
from equipoise.sim.machine import Machine
from equipoise.spec.model.presets import ModelSpec


def bound_by_kernels(
    model: ModelSpec,
    machine: Machine,
    space: Space,
    rows: Ints,
    passes: Passes,
    known: Travels,
    *,
    has_documents: bool,
) -> Floats:
    """Time that each row takes at least, float64 [rows] [s].

    Args:
        model: Sizes.
        machine: Links and memory.
        space: The choices.
        rows: Of choices whose kernels these are, int64 [n].
        passes: Least passes without recomputation; of windows for any number of micro-batches.
        known: Of ``fullest_rank_s``.
        has_documents: Whether micro-batches differ.
    """
    pp, count = space["pp"][rows], space.micro_batches[rows]
    if has_documents:  # of rows alike; a packer may need more than there are windows
        count = np.full(len(rows), passes.counts.sum())
    mean = mean_rank_s(model, space, rows, count, passes)
    even = passes.busy_s / passes.counts.sum() * count / pp
    is_plain = np.isin(space["schedule"][rows], schedules_with(lambda each: each.is_plain))
    longer = np.where(is_plain & (not has_documents), bubble(pp, count), 1.0)
    least = np.maximum(np.maximum(even * longer, mean), passes.once_s)
    least = np.maximum(least, fullest_rank_s(model, machine, space, rows, count, passes, known))
    return np.asarray(least * LESS / (1.0 - space.base.residuals.step_share))
