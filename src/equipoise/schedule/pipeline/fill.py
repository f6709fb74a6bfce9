"""Fill weight gradients into the gaps of an order of forwards and input gradients.

Why
    Nobody waits for a weight gradient. Where its rank would idle it costs nothing; too late, it
    keeps its activation alive.

What it decides
    Forwards and input gradients keep their order. All ranks are replayed together: while a
    message has not arrived, a rank runs the oldest weight gradients that finish before it does;
    before a forward for which there is no room, it runs weight gradients until there is.

Kept true (tests/unit/schedule/pipeline/test_strategies.py, by Hypothesis)
    The filled schedule passes ``check_pipeline`` with the given bound.

Sources
    Weight gradients in gaps, and at the memory limit: arXiv:2401.10241, section 3.1.
"""

import functools
from collections.abc import Sequence

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import FitError
from equipoise.schedule.compiled import run_loop
from equipoise.schedule.pipeline.instruction import OP, Op
from equipoise.schedule.pipeline.prices import PipelinePrices
from equipoise.schedule.pipeline.replay import needed_places
from equipoise.schedule.pipeline.schedule import PipelineSchedule
from equipoise.schedule.pipeline.sweep import fill

_needed_once = functools.lru_cache(maxsize=64)(needed_places)
"""Needed places of cached orders, which are filled for many prices."""


def fill_weights(
    bare: PipelineSchedule, prices: PipelinePrices, most_held: Sequence[int]
) -> tuple[Ints, ...]:
    """Add the weight gradients to orders of forwards and input gradients.

    Args:
        bare: Forwards and input gradients, in an order that can run.
        prices: Prices of every stage and micro-batch.
        most_held: The most that each rank may hold, in the unit of the activations.

    Returns:
        The order of each rank, int64 [n, 3].

    Raises:
        FitError: the forwards and input gradients alone exceed ``most_held``.

    Cost: O(instructions).
    """
    table = np.concatenate(bare.orders)
    op, stage, micro_batch = table.T
    needs, travels = _needed_once(bare)
    starts = np.cumsum([0, *(len(each) for each in bare.orders)])
    is_forward = op == Op.FORWARD
    # Each rank's order grows by one weight gradient per input gradient.
    doubles = np.concatenate(([0], np.cumsum(~is_forward)))
    begins = starts + doubles[starts]
    times = prices.of_ops()
    written = np.zeros(begins[-1], dtype=np.int64)
    waiting, end, queue = np.full((3, len(table)), -1, dtype=np.int64)
    ranks = np.zeros((8, bare.ranks), dtype=np.int64)
    following, moving, now, time, held, first, last, stands = ranks
    full = run_loop(
        fill,
        len(written),
        *(starts, begins[:-1], is_forward.astype(np.int64), needs, times[op, stage, micro_batch]),
        *(prices.hop_ns[micro_batch] * travels, times[Op.BACKWARD_WEIGHT, stage, micro_batch]),
        *(prices.activation[stage, micro_batch], np.asarray(most_held, dtype=np.int64)),
        *(waiting, following, moving, now, time, held, queue, first, last, end, written, stands),
    )
    if full >= 0:
        raise FitError(
            f"Rank {full} holds {held[full]:,} at a time; the limit is {most_held[full]:,}. Take a "
            f"strategy that holds less, such as v-half or auto, or raise the bound."
        )
    is_weight = written < 0
    rows = table[np.where(is_weight, -1 - written, written)]
    rows[is_weight, OP] = Op.BACKWARD_WEIGHT
    return tuple(
        rows[begin : begin + count]
        for begin, count in zip(begins[:-1].tolist(), stands.tolist(), strict=True)
    )
