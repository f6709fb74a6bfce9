"""Memory of every rank at every moment of a replayed step, in micro-batches and in bytes.

What it decides
    A forward takes credit for what it leaves behind when it begins; the weight gradient gives
    it back when it ends. So the peak of a rank's curve is what ``count_in_flight`` counts from
    its order, and the curve says when. In bytes all else stays as it is at the fullest moment;
    activations that are offloaded are taken to come and go as evenly as those in flight.

Kept true (tests/unit/sim/test_faults.py)
    Every curve ends at nothing, never falls below it, and its peak is the count of the order; in
    bytes the peak is the forecast of the rank, and the end what stays.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.schedule.pipeline.instruction import Op
from equipoise.sim.memory import StageMemory
from equipoise.sim.parts import PipelineRun


@dataclass(frozen=True, slots=True, eq=False)
class HeldCurve:
    """Holdings of one rank, from each moment on."""

    at_ns: Ints
    held: Floats
    """In the unit of what forwards leave behind, or in bytes."""


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


def bytes_over_time(run: PipelineRun, memory: StageMemory) -> list[HeldCurve]:
    """One curve for each pipeline rank, in bytes.

    Args:
        run: The pipeline of the data-parallel rank that ends last.
        memory: The same step's.
    """
    left = np.rint(memory.left[:, None] * np.array(run.tokens)[None, :]).astype(np.int64)
    curves = []
    for rank, curve in enumerate(held_over_time(run, left)):
        share = curve.held / max(memory.in_flight[rank], 1.0)
        stays = memory.stage_bytes[rank] - memory.flight_bytes[rank]
        curves.append(HeldCurve(curve.at_ns, stays + memory.flight_bytes[rank] * share))
    return curves
