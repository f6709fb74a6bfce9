"""The best of many schedules within a memory bound, for these prices.

What it decides
    With one stage a rank, orders that run more or fewer forwards ahead; with two, a V at three
    paces; with more, interleaved ones; and with any, two that are scheduled as they run. All
    have split backwards, and weight gradients filled into gaps up to the bound. The one with
    the least makespan is taken; of equals, the one whose ranks are at work for the shortest
    span, then the one that holds least, then the first.

    Where micro-batches share documents over time, 1F1B's order of units and the two that are
    scheduled as they run. Uneven micro-batches are tried as they are given, and in the order of
    ``pipeline_arrange``.

Kept true (tests/unit/schedule/test_pipeline_strategies.py, by Hypothesis)
    Within any bound that holds the largest unit; never slower than 1F1B or zb-h1 where these
    fit the bound.

Sources
    arXiv:2401.10241, section 3.1, whose memory-bounded search this stands for.
"""

import math
from collections.abc import Iterator

import numpy as np

from equipoise.schedule.instruction import Ints, Op
from equipoise.schedule.pipeline import (
    Order,
    PipelineSchedule,
    place_in_loop,
    place_in_v,
    whole_paths,
)
from equipoise.schedule.pipeline_arrange import arrange, light_outside, rename
from equipoise.schedule.pipeline_fill import fill_weights
from equipoise.schedule.pipeline_greedy import Greedy, Step, Taste
from equipoise.schedule.pipeline_orders import alternate, one_forward_one_backward
from equipoise.schedule.pipeline_replay import count_in_flight, replay_pipeline
from equipoise.schedule.pipeline_request import PipelineRequest
from equipoise.schedule.pipeline_v import PACES, lay_blocks

_AHEAD = (2.0, 1.5, 1.0, 0.75, 0.5, 0.25, 0.0)
"""Forwards ahead for each rank behind: 2 as zb-h2, 1 as 1F1B, less in less memory."""

_MOST_AHEAD = 3
"""How many of those that fit are tried, the largest first."""

_TASTES = (Taste(in_turn=False, patient=False), Taste(in_turn=False, patient=True))

_F, _I = int(Op.FORWARD), int(Op.BACKWARD_INPUT)


def auto(request: PipelineRequest) -> PipelineSchedule:
    """The fastest schedule found within the bound; 1F1B's memory where none is given."""
    bound = default_bound(request) if request.most_held is None else request.most_held
    in_v = request.chunks == 2 and not request.is_divided
    entering = light_outside(request.prices, request.units)
    arranged = arrange(request, entering)
    found = [_greedy(arranged, bound, taste, in_v=in_v) for taste in _TASTES]
    found += _filled(arranged, bound, in_v=in_v)
    found = [rename(each, entering, request.units) for each in found]
    if (entering != np.arange(request.micro_batches)).any():
        found += _filled(request, bound, in_v=in_v)
    return min(found, key=lambda each: _score(request, each))


def default_bound(request: PipelineRequest) -> Ints:
    """What 1F1B's first rank holds, with every micro-batch as large as the largest."""
    placed = place_in_loop(request.ranks, request.stages)
    if request.chunks == 2 and not request.is_divided:
        placed = place_in_v(request.ranks)
    held = np.zeros((request.ranks, request.micro_batches), dtype=np.int64)
    np.add.at(held, placed, request.prices.activation)
    per_unit = np.add.reduceat(held, request.units[:, 0], axis=1) if held.size else held
    longest = int((request.units[:, 1] - request.units[:, 0]).max(initial=1))
    most = min(request.ranks + longest - 1, request.micro_batches) * int(held.max(initial=0))
    return np.full(request.ranks, max(most, int(per_unit.max(initial=0))), dtype=np.int64)


def _score(request: PipelineRequest, schedule: PipelineSchedule) -> tuple[int, int, int]:
    timeline = replay_pipeline(schedule, request.prices)
    held = count_in_flight(schedule, request.prices.activation).peak
    return timeline.makespan_ns, int(timeline.span_ns.max(initial=0)), int(held.max(initial=0))


def _greedy(request: PipelineRequest, bound: Ints, taste: Taste, *, in_v: bool) -> PipelineSchedule:
    placed = place_in_v(request.ranks) if in_v else place_in_loop(request.ranks, request.stages)
    paths = whole_paths(request.stages, request.micro_batches)
    step = Step(request.prices, placed, paths, request.units, bound.tolist())
    return request.finish(Greedy(step, taste).run(), in_v=in_v)


def _filled(request: PipelineRequest, bound: Ints, *, in_v: bool) -> Iterator[PipelineSchedule]:
    """Fixed orders of forwards and input gradients that fit, weight gradients filled in."""
    tried = 0
    placed = place_in_v(request.ranks) if in_v else place_in_loop(request.ranks, request.stages)
    paths = whole_paths(request.stages, request.micro_batches)
    for orders in _orders(request, in_v=in_v):
        if tried == _MOST_AHEAD:
            return
        bare = request.finish(orders, in_v=in_v)
        held = count_in_flight(bare, request.prices.activation).peak_without_stash
        if (held > bound).any():
            continue
        tried += 1
        filled = fill_weights(orders, request.prices, placed, paths, bound.tolist())
        yield request.finish(filled, in_v=in_v)


def _orders(request: PipelineRequest, *, in_v: bool) -> Iterator[list[Order]]:
    """Orders without weight gradients, those that hold most first."""
    behind = [request.ranks - 1 - rank for rank in range(request.ranks)]
    if in_v:
        for pace in PACES:
            yield lay_blocks(request, pace, weights=False)
    elif request.is_divided:
        if request.chunks == 1:
            whole = one_forward_one_backward(request)
            yield [
                [(_F if op == _F else _I, stage, m) for op, stage, m in table.tolist()]
                for table in whole.orders
            ]
    elif request.chunks == 1:
        for share in _AHEAD:
            warm_ups = [math.ceil(share * each) for each in behind]
            yield [alternate(request, rank, each, _I) for rank, each in enumerate(warm_ups)]
    else:
        ahead = (request.chunks - 1) * request.ranks
        for factor in (2, 1):
            yield [
                alternate(request, rank, ahead + factor * each, _I)
                for rank, each in enumerate(behind)
            ]
