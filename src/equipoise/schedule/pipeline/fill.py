"""Weight gradients into the gaps of an order of forwards and input gradients.

Why
    Nobody waits for a weight gradient. Put where its rank would wait anyway it costs nothing;
    put too late it keeps its activation.

What it decides
    The order of forwards and input gradients stays. All ranks are replayed together; before
    an instruction whose message has not arrived, a rank runs as many of its oldest weight
    gradients as end before it does; before a forward for which there is no room, it runs
    weight gradients until there is.

Kept true (tests/unit/schedule/pipeline/test_strategies.py, by Hypothesis)
    What is filled passes ``check_pipeline`` with the bound that it was given.

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
"""Of orders that are remembered, and filled for many prices."""


def fill_weights(
    bare: PipelineSchedule, prices: PipelinePrices, most_held: Sequence[int]
) -> tuple[Ints, ...]:
    """Add the weight gradients to orders of forwards and input gradients.

    Args:
        bare: Forwards and input gradients, in an order that can run.
        prices: Of every stage and micro-batch.
        most_held: The most that each rank may hold, in the unit of the activations.

    Returns:
        The order of each rank, int64 [n, 3].

    Raises:
        FitError: the forwards and input gradients alone hold more than that.

    Cost: O(instructions).
    """
    table = np.concatenate(bare.orders)
    op, stage, micro_batch = table.T
    needs, travels = _needed_once(bare)
    starts = np.cumsum([0, *(len(each) for each in bare.orders)])
    is_forward = op == Op.FORWARD
    # Of each rank as many more as it has input gradients.
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
            f"Rank {full} holds {held[full]:,} at a time, {most_held[full]:,} are allowed. Take a "
            f"strategy that holds less, such as v-half or auto, or raise the bound."
        )
    is_weight = written < 0
    rows = table[np.where(is_weight, -1 - written, written)]
    rows[is_weight, OP] = Op.BACKWARD_WEIGHT
    return tuple(
        rows[begin : begin + count]
        for begin, count in zip(begins[:-1].tolist(), stands.tolist(), strict=True)
    )
