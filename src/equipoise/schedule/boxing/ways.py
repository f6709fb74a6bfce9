"""Common ways to redistribute a tensor, to compare with the cheapest path.

What it decides
    All axes in one step; axis by axis, each once, in the best order; and through the whole tensor,
    which is what gathering by hand does. Not all are possible everywhere.

Kept true (tests/unit/schedule/boxing/test_search.py,
tests/multi/parallel/test_boxing_in_process.py)
    Each leads to the dense tensor, and none is cheaper than the cheapest path.
"""

import itertools
from dataclasses import replace

from equipoise.schedule.boxing.path import (
    BoxingRequest,
    BoxingSchedule,
    Cost,
    PricedBoxing,
    add_costs,
)
from equipoise.schedule.boxing.placement import Broadcast, Placements


def other_ways(request: BoxingRequest) -> tuple[BoxingSchedule, ...]:
    """The common ways that are possible here, cheapest first.

    one step: all axes at once. axis by axis: each axis changes once, straight to what it shall be,
    in the best order. whole tensor: gathered on every rank, then cut.
    """
    if request.before == request.after:
        return ()
    direct = request.one_step(request.before, request.after)
    steps_by_name = {
        "one step": None if direct is None else (direct,),
        "axis by axis": _axis_by_axis(request),
        "whole tensor": _through_whole(request),
    }
    name_of = {steps: name for name, steps in reversed(steps_by_name.items()) if steps is not None}
    ways = [request.finish(name, steps) for steps, name in name_of.items()]
    return tuple(sorted(ways, key=lambda each: (each.seconds, each.sent_bytes, len(each.steps))))


def _axis_by_axis(request: BoxingRequest) -> tuple[PricedBoxing, ...] | None:
    ways: list[tuple[Cost, int, tuple[PricedBoxing, ...]]] = []
    away = [axis for axis, each in enumerate(request.before) if each != request.after[axis]]
    for number, order in enumerate(itertools.permutations(away)):
        state, total = request.before, (0.0, 0, 0)
        steps: tuple[PricedBoxing, ...] = ()
        for axis in order:
            after = (*state[:axis], request.after[axis], *state[axis + 1 :])
            priced = request.one_step(state, after)
            if priced is None:
                break
            state, steps, total = after, (*steps, priced), add_costs(total, priced.cost)
        else:
            ways.append((total, number, steps))
    return min(ways)[2] if ways else None


def _through_whole(request: BoxingRequest) -> tuple[PricedBoxing, ...] | None:
    whole: Placements = (Broadcast(),) * len(request.on.mesh)
    if whole in (request.before, request.after):
        return None
    there = _axis_by_axis(replace(request, after=whole))
    cut = _axis_by_axis(replace(request, before=whole))
    return None if there is None or cut is None else (*there, *cut)
