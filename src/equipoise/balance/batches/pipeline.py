"""The order of a rank's micro-batches in its pipeline, and how long the step then takes.

What it decides
    A micro-batch takes a third of its time forward and two thirds backward, in equal shares on
    all stages. Three orders are replayed under the trainer's schedule: as ``light_outside`` has
    them, heaviest first, lightest first. The shortest wins; the first on a tie.

Kept true (tests/unit/balance/batches/test_pipeline.py, by Hypothesis)
    The makespan is that of ``replay_pipeline``, and never below ``bound_pipeline``; the order is
    no longer than the one given.
"""

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.schedule.pipeline.arrange import light_outside
from equipoise.schedule.pipeline.prices import PipelinePrices, make_prices
from equipoise.schedule.pipeline.replay import replay_pipeline
from equipoise.schedule.pipeline.schedule import single_units
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.spec.catalog import SCHEDULES

_WHOLE_NS = 1e15
"""Time of all micro-batches while they are ordered [ns]."""


def order_in_pipeline(
    seconds: Floats, schedule: str, ranks: int, *, units: list[tuple[int, int]] | None = None
) -> tuple[Ints, float]:
    """Order one data-parallel rank's micro-batches for its pipeline.

    Args:
        seconds: Forward and backward of each micro-batch over all stages, float64
            [micro-batches] [s].
        schedule: A pipeline schedule by name.
        ranks: Pipeline ranks.
        units: Runs of micro-batches that share divided samples; these keep their order, and so
            do all others.

    Returns:
        The micro-batches in the order in which they enter, and the makespan [s].

    Raises:
        SpecError: no schedule has that name.
        LayoutError: the schedule cannot run these micro-batches on these ranks.

    >>> order, makespan_s = order_in_pipeline(np.array([3.0, 1.0, 2.0, 2.0]), "1f1b", 2)
    >>> order.tolist(), round(makespan_s, 2)
    ([1, 3, 0, 2], 4.83)
    """
    stages = stages_of(schedule, ranks)
    # Given prices may be of any scale; a schedule counts whole nanoseconds.
    whole = float(seconds.sum()) or 1.0
    times_ns = seconds / whole * _WHOLE_NS
    prices = _prices(times_ns, stages)
    heaviest = np.argsort(-seconds, kind="stable")
    orders = [light_outside(prices, single_units(len(seconds))), heaviest, heaviest[::-1]]
    if units is not None:
        orders = [np.arange(len(seconds))]
    distinct = [np.array(order) for order in dict.fromkeys(tuple(each.tolist()) for each in orders)]
    times = [_makespan_ns(times_ns[order], schedule, ranks, units) for order in distinct]
    best = int(np.argmin(times))
    return distinct[best], times[best] / _WHOLE_NS * whole


def stages_of(schedule: str, ranks: int) -> int:
    """Stages that a schedule has on these ranks: one per rank, or two in a V."""
    traits = SCHEDULES.get(schedule)
    return 2 * ranks if traits is not None and traits.in_v else ranks


def _makespan_ns(
    times_ns: Floats, schedule: str, ranks: int, units: list[tuple[int, int]] | None
) -> int:
    prices = _prices(times_ns, stages_of(schedule, ranks))
    written = write_pipeline(schedule, prices, ranks=ranks, units=units)
    return replay_pipeline(written, prices).makespan_ns


def _prices(times_ns: Floats, stages: int) -> PipelinePrices:
    third = times_ns / (3 * stages)
    return make_prices(third, third, third, stages=stages)
