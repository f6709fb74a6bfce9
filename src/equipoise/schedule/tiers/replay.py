"""What a cache would do on a trace, beside the best that any could.

What it decides
    A step reads its distinct rows, then they want a slot: the trainer's own decisions, on the same
    class. Belady's bound keeps, of all rows in a cache without sets, those whose next step is
    nearest; no policy with as many slots hits more.

Kept true (tests/unit/schedule/test_tiers.py, by Hypothesis)
    The bound equals brute force on small traces; no policy exceeds it.

Sources
    L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.schedule.tiers.cache import MOST_WAYS, CachePolicy, SetCache


def replay_hits(
    steps: Sequence[Ints],
    slots: int,
    policy: CachePolicy,
    *,
    ways: int = MOST_WAYS,
    reads: Sequence[Ints] | None = None,
) -> Ints:
    """Rows of each step that lie in the cache when the step reads them.

    Args:
        steps: Distinct rows of each step, ascending int64.
        slots: Slots of the cache.
        policy: What stays; ``trace`` knows all steps.
        ways: Of a set.
        reads: Those rows of each step that are read; all unless given.

    Returns:
        int64 [steps].
    """
    most = max((int(rows[-1]) for rows in steps if len(rows)), default=-1)
    cache = SetCache(most + 1, slots, policy, ways=ways)
    if policy == "trace":
        cache.expect(steps, 0)
    hits = []
    for rows, read in zip(steps, steps if reads is None else reads, strict=True):
        hits.append(int((cache.find(read) >= 0).sum()))
        cache.admit(rows)
    return np.array(hits, dtype=np.int64)


def bound_hits(steps: Sequence[Ints], slots: int) -> int:
    """The most hits that any cache of ``slots`` slots has on the trace (Belady).

    Cost: O(n log n) in the rows of all steps.

    >>> bound_hits([np.array([1]), np.array([2]), np.array([1]), np.array([2])], 1)
    1
    """
    after: list[list[int]] = []
    seen: dict[int, int] = {}
    for number in range(len(steps) - 1, -1, -1):
        rows = steps[number].tolist()
        after.append([seen.get(row, len(steps)) for row in rows])
        seen.update(dict.fromkeys(rows, number))
    after.reverse()
    held: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    hits = 0
    for rows, uses in zip(steps, after, strict=True):
        hits += sum(row in held for row in rows.tolist())
        for row, use in zip(rows.tolist(), uses, strict=True):
            held[row] = use
            heapq.heappush(farthest, (-use, row))
        while len(held) > slots:
            use, row = heapq.heappop(farthest)
            if held.get(row) == -use:
                del held[row]
    return hits
