"""Bounds of all families that are known best, before any is looked at closer.

Why
    A search that looks at what has the least bound first finds nothing good for long, for what has
    the least is what is known least of. Where it is known which stage has which layers, bounds are
    within a few percent, and the best by these are among the best.

What it decides
    Which families are bounded together: those whose layers stay alike.

Kept true (tests/unit/plan/test_dive.py)
    Bounds never sink; what is not alike stays as it was.
"""

import heapq
import time
from collections.abc import Callable

from equipoise.plan.room import is_even
from equipoise.plan.space import Ints, Space

Item = tuple[float, int, int]
"""Bound [s]; stage: 0 of a group, 1 and 2 of a family before and after this, 3 of a row; place."""


def dive(
    queue: list[Item],
    members: list[Ints],
    space: Space,
    family_s: Callable[[int], float],
    limit: float,
    until: float,
) -> int:
    """Bound families by their pipelines, as far as they may be better than a limit.

    Args:
        queue: Heap of what waits; is changed in place.
        members: Rows of each family.
        space: The choices.
        family_s: The bound of a row's family.
        limit: Of bounds [s].
        until: When to stop, by ``time.monotonic`` [s].

    Returns:
        How many were bounded.
    """
    count = 0
    for place, (bound, stage, at) in enumerate(queue):
        if stage != 1 or bound >= limit:
            continue
        row = int(members[at][0])
        if not is_even(space.choice(row).options):
            continue
        if time.monotonic() > until:
            break
        queue[place] = max(bound, family_s(row)), 2, at
        count += 1
    heapq.heapify(queue)
    return count
