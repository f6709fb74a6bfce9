"""Pipeline schedules by name: from prices, ranks, units and a memory bound to orders.

Kept true (tests/unit/schedule/pipeline/test_strategies.py, by Hypothesis)
    Every strategy's schedule passes ``check_pipeline`` for any stages, prices and bounds, or is
    refused with the numbers.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import EquipoiseError, FitError, LayoutError, SpecError
from equipoise.base.load import load
from equipoise.base.nearest import nearest
from equipoise.base.shown import shown
from equipoise.schedule.pipeline.arrange import arrange, light_outside, rename
from equipoise.schedule.pipeline.check import find_excess
from equipoise.schedule.pipeline.prices import PipelinePrices
from equipoise.schedule.pipeline.replay import count_in_flight
from equipoise.schedule.pipeline.request import PipelineRequest, PipelineStrategy
from equipoise.schedule.pipeline.schedule import (
    PipelineSchedule,
    place_in_loop,
    place_in_v,
    single_units,
)
from equipoise.spec.catalog import LOSSY, SCHEDULES


def place_stages(strategy: str, ranks: int, stages: int) -> Ints:
    """The pipeline rank of each stage, int64 [stages].

    >>> place_stages("zb-v", 2, 4).tolist(), place_stages("interleaved", 2, 4).tolist()
    ([0, 1, 1, 0], [0, 1, 0, 1])
    """
    return place_in_v(ranks) if SCHEDULES[strategy].in_v else place_in_loop(ranks, stages)


def require_strategy(strategy: str) -> None:
    """Refuse a pipeline schedule that there is not."""
    if not isinstance(strategy, str) or strategy not in SCHEDULES:
        raise SpecError(
            f"No pipeline strategy is called {shown(strategy)}. Nearest: "
            f"{nearest(str(strategy), SCHEDULES)}. All: {', '.join(SCHEDULES)}."
        )


def write_pipeline(
    strategy: str,
    prices: PipelinePrices,
    *,
    ranks: int,
    units: Sequence[tuple[int, int]] | None = None,
    most_held: int | Sequence[int] | None = None,
    skip: float = 0.0,
    arranged: bool = False,
) -> PipelineSchedule:
    """Write the schedule of one step.

    Args:
        strategy: A name in ``spec.catalog.SCHEDULES``.
        prices: Prices of every stage and micro-batch; as many stages as ranks, or a multiple.
        ranks: Pipeline-parallel degree, >= 1.
        units: Runs ``[first, stop)`` of micro-batches that share documents over time, from
            ``balance.packing.divided.macro_units``; one per micro-batch unless given.
        most_held: The most that a rank may hold, for all ranks or for each, in the unit of
            ``prices.activation``; no bound unless given, except 1F1B's for ``auto``.
        skip: Share of the stages between the first and the last that each micro-batch leaves
            out; of the lossy strategies alone.
        arranged: Whether micro-batches may enter in another order than they are given, light
            ones first and last, which shortens the step where they are uneven; ``auto``
            tries both.

    Raises:
        SpecError: no strategy has that name.
        LayoutError: stages and ranks, or units and micro-batches, do not match, or the
            strategy needs another number of stages, more micro-batches or undivided documents.
        FitError: a rank would hold more than it may; says by how much, and what fits.

    Cost: O(instructions); of ``auto`` some six times that.

    >>> from equipoise.schedule.pipeline.prices import make_prices
    >>> print(write_pipeline("zb-h1", make_prices(1, 1, 1, stages=2, micro_batches=3), ranks=2))
    zb-h1: 3 micro-batches through 2 stages on 2 ranks
    rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    require_strategy(strategy)
    if ranks < 1 or prices.stages % ranks or not prices.stages:
        raise LayoutError(
            f"{prices.stages} stages cannot be shared by {ranks} ranks. Give as many stages as "
            f"ranks, or a multiple."
        )
    if skip and not SCHEDULES[strategy].is_lossy:
        raise LayoutError(
            f"{strategy} skips nothing, but skip is {skip:g}. Take {' or '.join(LOSSY)}, "
            f"which train another model, or omit skip."
        )
    runs = _make_units(units, prices.micro_batches)
    bound = None if most_held is None else _make_bound(most_held, ranks)
    request = PipelineRequest(strategy, prices, ranks, runs, bound, skip)
    if arranged:
        entering = light_outside(prices, runs)
        schedule = rename(_write(arrange(request, entering)), entering, runs)
    else:
        schedule = _write(request)
    if bound is not None and (over := find_excess(schedule, prices.activation, bound)):
        rank, held, allowed = over
        fitting = ", ".join(_which_fit(request, bound)) or "none"
        raise FitError(
            f"{strategy} holds {held:,} on rank {rank}; the limit is {allowed:,}: "
            f"{held - allowed:,} too many. These fit: {fitting}."
        )
    return schedule


def _write(request: PipelineRequest) -> PipelineSchedule:
    write: PipelineStrategy = load(SCHEDULES[request.strategy].writer)
    return write(request)


def _make_units(units: Sequence[tuple[int, int]] | None, micro_batches: int) -> Ints:
    if units is None:
        return single_units(micro_batches)
    table = np.asarray(units, dtype=np.int64).reshape(-1, 2)
    edges = np.concatenate(([0], table[:, 1]))
    ends_well = edges[-1] == micro_batches
    if not ends_well or (table[:, 0] != edges[:-1]).any() or (table[:, 1] <= table[:, 0]).any():
        runs = ", ".join(f"{first}:{stop}" for first, stop in table.tolist())
        raise LayoutError(
            f"Units {runs} are not {micro_batches} micro-batches in order, each in one. Take those "
            f"that macro_units finds."
        )
    return table


def _make_bound(most_held: int | Sequence[int], ranks: int) -> Ints:
    bound = np.asarray(most_held, dtype=np.int64).reshape(-1)
    if len(bound) not in (1, ranks):
        raise LayoutError(
            f"Bounds are given for {len(bound)} ranks, but there are {ranks}. Give one for all, "
            f"or one for each."
        )
    return np.ascontiguousarray(np.broadcast_to(bound, ranks))


def _which_fit(request: PipelineRequest, bound: Ints) -> list[str]:
    """Strategies that keep the bound, with the most that they hold."""
    fitting = []
    for name, traits in SCHEDULES.items():
        if traits.is_lossy or name == request.strategy:
            continue
        try:
            schedule = _write(replace(request, strategy=name))
        except EquipoiseError:
            continue
        if find_excess(schedule, request.prices.activation, bound) is None:
            held = count_in_flight(schedule, request.prices.activation).peak
            fitting.append(f"{name} ({int(held.max(initial=0)):,})")
    return fitting
