"""What every rank holds at every moment of a replayed step.

What it decides
    A forward takes credit for what it leaves behind when it begins; the weight gradient gives
    it back when it ends. So the peak of a rank's curve is what ``count_in_flight`` counts from
    its order, and the curve says when.

Kept true (tests/unit/sim/test_faults.py)
    Every curve ends at nothing, never falls below it, and its peak is the count of the order.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.cost.step import Floats
from equipoise.schedule.instruction import Ints, Op
from equipoise.sim.parts import PipelineRun


@dataclass(frozen=True, slots=True, eq=False)
class HeldCurve:
    """Micro-batch equivalents that one rank holds, from each moment on."""

    at_ns: Ints
    held: Floats
    """In micro-batches of the largest size, of all the rank's layers."""


def held_over_time(run: PipelineRun, activation: Ints) -> list[HeldCurve]:
    """One curve for each pipeline rank.

    Args:
        run: A replayed pipeline.
        activation: What each forward leaves behind, int64 [stages, micro-batches], in any unit.
    """
    timeline, curves = run.timeline, []
    size = activation[timeline.stage, timeline.micro_batch].astype(np.float64)
    takes = timeline.op == Op.FORWARD
    gives = np.isin(timeline.op, (Op.BACKWARD, Op.BACKWARD_WEIGHT))
    for rank in range(timeline.ranks):
        here = timeline.rank == rank
        times = np.concatenate((timeline.begin_ns[here & takes], timeline.end_ns[here & gives]))
        steps = np.concatenate((size[here & takes], -size[here & gives]))
        # Of equal moments, what is given back comes first.
        order = np.lexsort((steps, times))
        curves.append(HeldCurve(times[order], np.cumsum(steps[order])))
    return curves
