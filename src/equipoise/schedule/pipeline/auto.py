"""Find the fastest of many schedules within a memory bound, for the given prices.

What it decides
    It tries: with one stage per rank, orders that run more or fewer forwards ahead; with two, a V
    at three paces; with more, interleaved orders; and always two greedy schedules. All split the
    backward and fill weight gradients into gaps up to the bound; uneven micro-batches are ordered
    by ``arrange``. It also tries the strategies that a user would name, unchanged: with one stage
    per rank 1F1B and zb-h1, with more the interleaved ones, with two also zb-v and dualpipe-v. So
    two stages per rank may lie in a V or in a loop, whichever is faster.

    The lowest makespan wins; ties go to the shortest busy span of ranks, then to the least
    memory, then to the first. A schedule that reaches ``bound_pipeline`` ends the search.

    Where micro-batches share documents over time, 1F1B's order of units and the two that are
    scheduled as they run.

Kept true (tests/unit/schedule/pipeline/test_strategies.py, by Hypothesis)
    The schedule keeps any bound that holds the largest unit; it is never slower than the named
    strategies that fit the bound.

Sources
    arXiv:2401.10241, section 3.1, whose memory-bounded search this replaces.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import FitError
from equipoise.schedule.pipeline.arrange import arrange, light_outside, rename
from equipoise.schedule.pipeline.bound import bound_pipeline
from equipoise.schedule.pipeline.fill import fill_weights
from equipoise.schedule.pipeline.greedy import Greedy, Step, Taste
from equipoise.schedule.pipeline.instruction import OP, Op
from equipoise.schedule.pipeline.orders import (
    interleaved,
    largest_round,
    one_forward_one_backward,
)
from equipoise.schedule.pipeline.replay import count_in_flight, replay_pipeline
from equipoise.schedule.pipeline.request import PipelineRequest, PipelineStrategy
from equipoise.schedule.pipeline.schedule import (
    PipelineSchedule,
    place_in_loop,
    place_in_v,
    whole_paths,
)
from equipoise.schedule.pipeline.v import HALF, LEAST, dualpipe_v, lay_blocks, order_zb_v, zb_v
from equipoise.schedule.pipeline.zero_bubble import interleaved_zb, lay_split, zb_h1

_AHEAD = (2.0, 1.5, 1.0, 0.75, 0.5, 0.25, 0.0)
"""Forwards run ahead per later rank: 2 as in zb-h2, 1 as in 1F1B, fewer to save memory."""

_MOST_TRIED = 3
"""How many of the orders that fit are tried, starting with those that hold the most."""

_TASTES = (Taste(in_turn=False, patient=False), Taste(in_turn=False, patient=True))


def auto(request: PipelineRequest) -> PipelineSchedule:
    """The fastest schedule within the bound; the bound is 1F1B's memory unless given."""
    floor = min(bound_pipeline(request.prices, placed) for placed in _placements(request))
    candidates: list[tuple[tuple[int, int, int], PipelineSchedule]] = []
    for schedule in _candidates(request):
        timeline = replay_pipeline(schedule, request.prices)
        held = count_in_flight(schedule, request.prices.activation).peak
        span_ns = int(timeline.span_ns.max(initial=0))
        candidates.append(((timeline.makespan_ns, span_ns, int(held.max(initial=0))), schedule))
        if timeline.makespan_ns <= floor:
            break
    return min(candidates, key=lambda each: each[0])[1]


def _is_v(request: PipelineRequest) -> bool:
    return request.chunks == 2 and not request.is_divided


def _placed(request: PipelineRequest) -> Ints:
    if _is_v(request):
        return place_in_v(request.ranks)
    return place_in_loop(request.ranks, request.stages)


def _placements(request: PipelineRequest) -> list[Ints]:
    """The placements of stages to try."""
    in_loop = place_in_loop(request.ranks, request.stages)
    return [place_in_v(request.ranks), in_loop] if _is_v(request) else [in_loop]


def default_bound(request: PipelineRequest, placed: Ints) -> Ints:
    """What 1F1B's first rank would hold if every micro-batch were as large as the largest."""
    held = np.zeros((request.ranks, request.micro_batches), dtype=np.int64)
    np.add.at(held, placed, request.prices.activation)
    per_unit = np.add.reduceat(held, request.units[:, 0], axis=1) if held.size else held
    longest = int((request.units[:, 1] - request.units[:, 0]).max(initial=1))
    most = min(request.ranks + longest - 1, request.micro_batches) * int(held.max(initial=0))
    return np.full(request.ranks, max(most, int(per_unit.max(initial=0))), dtype=np.int64)


def _candidates(request: PipelineRequest) -> Iterator[PipelineSchedule]:
    placed = _placed(request)
    bound = default_bound(request, placed) if request.most_held is None else request.most_held
    entering = light_outside(request.prices, request.units)
    arranged = arrange(request, entering)
    paths = whole_paths(request.stages, request.micro_batches)
    step = Step(arranged.prices, placed, paths, arranged.units, bound.tolist())
    refusal: FitError | None = None
    try:
        runs = [Greedy(step, taste) for taste in _TASTES]  # raises if nothing fits the bound
    except FitError as fault:  # true in a V; in a loop another rank holds the last stage
        refusal = fault
    else:
        for each in _filled(arranged, bound):
            yield rename(each, entering, request.units)
        for run in runs:
            each = arranged.finish(run.run(), in_v=_is_v(request))
            yield rename(each, entering, request.units)
    for each in _usual_within(request, arranged, entering, bound):
        refusal = None
        yield each
    if refusal is not None:
        raise refusal


def _usual_within(
    request: PipelineRequest, arranged: PipelineRequest, entering: Ints, bound: Ints
) -> Iterator[PipelineSchedule]:
    """Schedules of named strategies that keep the bound, with both orders of micro-batches."""
    for write in _usual(request):
        for wanted, names in ((arranged, entering), (request, np.sort(entering))):
            each = rename(write(replace(wanted, most_held=bound)), names, request.units)
            if (count_in_flight(each, request.prices.activation).peak <= bound).all():
                yield each
            if (names == np.arange(len(names))).all():
                break


def _usual(request: PipelineRequest) -> tuple[PipelineStrategy, ...]:
    """Named strategies whose unchanged schedule may be the best."""
    if request.is_divided:
        return (one_forward_one_backward,) if request.chunks == 1 else ()
    if request.chunks == 1:
        return one_forward_one_backward, zb_h1
    if request.chunks > 2:
        return interleaved_zb, interleaved
    if request.micro_batches < 2 * request.ranks:
        return zb_v, interleaved_zb, interleaved
    return zb_v, dualpipe_v, interleaved_zb, interleaved


def _filled(request: PipelineRequest, bound: Ints) -> Iterator[PipelineSchedule]:
    """The first few orders that fit, with weight gradients filled in."""
    tried = 0
    for bare in _orders(request):
        if tried == _MOST_TRIED:
            return
        held = count_in_flight(bare, request.prices.activation).peak_without_stash
        if (held > bound).any():
            continue
        tried += 1
        yield replace(bare, orders=fill_weights(bare, request.prices, bound.tolist()))


def _orders(request: PipelineRequest) -> Iterator[PipelineSchedule]:
    """Orders without weight gradients, starting with those that hold the most."""
    behind = [request.ranks - 1 - rank for rank in range(request.ranks)]
    if _is_v(request):
        yield order_zb_v(request)
        for pace in (HALF, LEAST):
            yield lay_blocks(request, pace, weights=False)
    elif request.is_divided:
        if request.chunks == 1:
            whole = one_forward_one_backward(request)
            yield replace(whole, orders=tuple(_split_whole(table) for table in whole.orders))
    elif request.chunks == 1:
        for share in _AHEAD:
            yield lay_split(request, tuple(math.ceil(share * each) for each in behind))
    else:
        ahead = (request.chunks - 1) * largest_round(request)
        for factor in (2, 1):
            yield lay_split(request, tuple(ahead + factor * each for each in behind))


def _split_whole(table: Ints) -> Ints:
    """The order with whole backwards replaced by input gradients."""
    split = table.copy()
    split[split[:, OP] != Op.FORWARD, OP] = Op.BACKWARD_INPUT
    return split
