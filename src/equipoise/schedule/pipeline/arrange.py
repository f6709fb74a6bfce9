"""Order a step's micro-batches for the pipeline: light ones first and last.

Why
    Ranks wait for each other where neighbouring micro-batches differ, most of all while the
    pipeline fills and drains and there is no other work. Any order of a step's micro-batches
    has the same gradients, so the order is free.

What it decides
    Micro-batches get heavier up to the middle and lighter after it, so that neighbours are
    similar and the light ones are at both ends. Units stay together. Equal micro-batches keep
    their order.

Kept true (tests/unit/schedule/pipeline/test_arrange.py, by Hypothesis)
    Every micro-batch appears once; slices of a document stay in order; the answer depends on
    prices alone.
"""

from dataclasses import replace

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.schedule.pipeline.instruction import MICRO_BATCH
from equipoise.schedule.pipeline.prices import PipelinePrices
from equipoise.schedule.pipeline.request import PipelineRequest
from equipoise.schedule.pipeline.schedule import PipelineSchedule


def light_outside(prices: PipelinePrices, units: Ints) -> Ints:
    """Micro-batches in the order in which they should enter the pipeline, int64.

    >>> from equipoise.schedule.pipeline.schedule import single_units
    >>> from equipoise.schedule.pipeline.prices import make_prices
    >>> work = [30, 10, 50, 20, 40]
    >>> light_outside(make_prices(work, work, work, stages=2), single_units(5)).tolist()
    [1, 0, 2, 4, 3]
    """
    work = (prices.forward_ns + prices.input_ns + prices.weight_ns).sum(axis=0)
    weight = np.add.reduceat(work, units[:, 0]) if len(units) else work
    every = np.arange(len(units))
    if len(units) < 2 or (weight == weight[0]).all():
        chosen = every
    else:
        lightest = np.lexsort((every, weight))
        chosen = np.concatenate((lightest[::2], lightest[1::2][::-1]))
    runs = [np.arange(first, stop) for first, stop in units[chosen].tolist()]
    return np.concatenate(runs) if runs else every


def arrange(request: PipelineRequest, entering: Ints) -> PipelineRequest:
    """The same request with micro-batches renumbered in the order in which they enter."""
    prices = request.prices
    arranged = PipelinePrices(
        prices.forward_ns[:, entering],
        prices.input_ns[:, entering],
        prices.weight_ns[:, entering],
        prices.hop_ns[entering],
        prices.activation[:, entering],
    )
    unit_of = np.repeat(np.arange(len(request.units)), np.diff(request.units, axis=1)[:, 0])
    new = unit_of[entering]
    edges = np.flatnonzero(np.diff(new, prepend=-1, append=-1))
    units = np.stack((edges[:-1], edges[1:]), axis=1)
    return replace(request, prices=arranged, units=units)


def rename(schedule: PipelineSchedule, entering: Ints, units: Ints) -> PipelineSchedule:
    """A schedule of arranged micro-batches with the original numbers restored."""
    orders = []
    for order in schedule.orders:
        named = order.copy()
        named[:, MICRO_BATCH] = entering[order[:, MICRO_BATCH]]
        orders.append(named)
    paths = np.empty_like(schedule.paths)
    paths[entering] = schedule.paths
    return replace(schedule, orders=tuple(orders), paths=paths, units=units)
