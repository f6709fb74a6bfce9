"""Bounds of all families that are known best, before any is looked at closer.

Why
    A search that looks at what has the least bound first finds nothing good for long, for what has
    the least is what is known least of. Where it is known which stage has which layers, bounds are
    within a few percent, and the best by these are among the best.

What it decides
    Which families are bounded together: those whose layers stay alike.

Kept true (tests/unit/plan/search/test_dive.py)
    Bounds never sink; what is not alike stays as it was.
"""

import heapq
from collections.abc import Callable, Sequence

from equipoise.base.arrays import Ints
from equipoise.plan.bounds.memory import is_even
from equipoise.plan.search.stage import BOUNDED, FAMILY, Item
from equipoise.plan.space.columns import Space

_AT_ONCE = 64
"""Families that are looked at together."""


def dive(
    queue: list[Item],
    members: list[Ints],
    space: Space,
    look: Callable[[Sequence[Item]], Sequence[float]],
    limit: float,
    is_over: Callable[[], bool],
) -> int:
    """Bound families by their pipelines, as far as they may be better than a limit.

    Args:
        queue: Heap of what waits; is changed in place.
        members: Rows of each family.
        space: The choices.
        look: Bounds of some families [s].
        limit: Of bounds [s].
        is_over: Whether to stop.

    Returns:
        How many were bounded.
    """
    places = [
        place
        for place, (bound, stage, at) in enumerate(queue)
        if stage == FAMILY and bound < limit and is_even(space.choice(int(members[at][0])).options)
    ]
    count = 0
    for first in range(0, len(places), _AT_ONCE):
        if is_over():
            break
        these = places[first : first + _AT_ONCE]
        for place, tighter in zip(these, look([queue[place] for place in these]), strict=True):
            bound, _, at = queue[place]
            queue[place] = max(bound, tighter), BOUNDED, at
        count += len(these)
    heapq.heapify(queue)
    return count
