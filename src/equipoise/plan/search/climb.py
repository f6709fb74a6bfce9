"""A good choice within a few dozen prices: guess, then change one thing at a time.

Why
    A bound prunes nothing until there is something to beat.

What it decides
    Which choices are priced first. Guesses are the peak's time, longer by what a pipeline of such
    stages waits, and by traffic inside and between layers; choices whose memory bound is close to
    the device's come last. From the best few that differ in their degrees, each *move* exchanges
    some columns; whatever is now among the best is moved from again, until nothing new is. Guesses
    decide the order of the search alone, never its answer.

Kept true (tests/unit/plan/search/test_search.py)
    Every row it prices is of the space; it ends.
"""

from collections.abc import Callable, Sequence

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.plan.space.columns import COLUMNS, Space, schedules_with

_MOVES = (
    ("recompute",),
    ("offload",),
    ("recompute", "offload"),
    ("order",),
    ("schedule", "virtual"),
    ("micro_batch",),
    ("tp", "dp"),
    ("pp", "dp", "schedule", "virtual"),
    ("tp", "pp", "schedule", "virtual"),
    ("cp", "dp", "context_strategy"),
    ("cp", "tp", "context_strategy"),
    ("zero", "replicas"),
    ("zero", "replicas", "recompute"),
    ("ep", "etp"),
    ("pp", "dp", "recompute", "schedule", "virtual"),
    ("tp", "dp", "recompute"),
    ("cp", "pp", "context_strategy", "schedule", "virtual"),
    ("tp", "pp", "dp", "schedule", "virtual"),
    ("tp", "cp", "pp", "context_strategy", "schedule", "virtual"),
    ("cp", "pp", "dp", "recompute", "context_strategy", "schedule", "virtual"),
)
_STARTS = 6
_TRIES = 4
"""Of one move."""
_ROUNDS = 4
_BEAM = 3
"""Choices of other degrees that are moved from at once."""
_AT_ONCE = 12
"""Choices that are priced before the clock is looked at."""
_ROOMY = 0.7
"""Share of the memory below which a bound leaves room."""
_CLOSE = 0.9
"""Share of the memory above which a bound leaves little room for what it does not count."""


def climb(
    space: Space,
    rows: Ints,
    memory: Floats,
    peak: Floats,
    price: Callable[[list[int]], Sequence[float]],
    is_over: Callable[[], bool],
) -> None:
    """Price likely rows.

    Args:
        space: The choices.
        rows: Those that may fit, int64 [n].
        memory: Their memory bound over what a device has, float64 [n].
        peak: Their time bound, float64 [n] [s].
        price: Seconds of some rows; infinite of one that does not fit.
        is_over: Whether to stop.
    """
    if not len(rows):
        return
    kept = space.keep(rows)
    guess = guess_s(kept, peak) * np.where(memory > _CLOSE, 1.5, 1.0)
    order = np.argsort(guess, kind="stable")
    tried: dict[int, float] = {}

    def attempt(places: list[int]) -> None:
        new = [at for at in dict.fromkeys(places) if at not in tried]
        for these in (new[at : at + _AT_ONCE] for at in range(0, len(new), _AT_ONCE)):
            found = [np.inf] * len(these) if is_over() else price(rows[these].tolist())
            tried.update(zip(these, found, strict=True))

    attempt(_starts(space, rows, order) + _starts(space, rows, order[memory[order] < _ROOMY]))
    moved: set[int] = set()
    for _ in range(_ROUNDS):
        if not np.isfinite(min(tried.values())):  # nothing fits yet: what needs least
            attempt([int(np.argmin(memory))])
        ranked = sorted(tried, key=lambda at: (tried[at], at))
        beam = _apart(space, rows, ranked, _BEAM)
        for best in beam:
            if best in moved:
                continue
            moved.add(best)
            differs, places = _differing(kept, best), list[int]()
            for move in _MOVES:
                fixed = sum(1 << at for at, name in enumerate(COLUMNS) if name not in move)
                near = np.flatnonzero(differs & fixed == 0)
                places += near[np.argsort(guess[near], kind="stable")][:_TRIES].tolist()
            attempt(places)
        ranked = sorted(tried, key=lambda at: (tried[at], at))
        if is_over() or set(_apart(space, rows, ranked, _BEAM)) <= moved:
            return


def _differing(space: Space, row: int) -> Ints:
    """Columns in which each row is not this one, a bit for each, int64 [rows]."""
    bits = np.zeros(len(space), dtype=np.int64)
    for at, name in enumerate(COLUMNS):
        bits |= (space[name] != space[name][row]).astype(np.int64) << at
    return bits


def _starts(space: Space, rows: Ints, order: Ints) -> list[int]:
    """The best guess of each of the first few degrees."""
    return _apart(space, rows, order[:20_000].tolist(), _STARTS)


def _apart(space: Space, rows: Ints, ranked: Sequence[int], count: int) -> list[int]:
    """The first few that differ in a degree."""
    seen: dict[tuple[int, ...], int] = {}
    for at in ranked:
        degrees = tuple(int(space[name][rows[at]]) for name in ("tp", "cp", "pp", "dp", "ep"))
        seen.setdefault(degrees, at)
        if len(seen) == count:
            break
    return list(seen.values())


def guess_s(space: Space, peak: Floats) -> Floats:
    """What each choice takes about, by its peak's time, float64 [rows] [s]."""
    pp, virtual, m = space["pp"], space["virtual"], space.micro_batches
    waits = (pp - 1) / (virtual * m)
    is_split = np.isin(space["schedule"], schedules_with(lambda each: each.splits_backward))
    is_plain = np.isin(space["schedule"], schedules_with(lambda each: each.is_plain))
    # The bound of 1F1B has its bubble in it.
    longer = np.where(is_plain, 1.0, 1.0 + waits * np.where(is_split, 0.6, 1.0))
    traffic = 1.0 + 0.04 * np.log2(space["tp"]) + 0.5 * (space["tp"] > 8)
    traffic = traffic + 0.06 * np.log2(space["cp"])
    traffic = traffic + np.where((space["zero"] == 3) & (pp > 1), 1.0, 0.0)
    traffic = traffic + np.where(space["zero"] == 0, 0.05, 0.0)
    small = np.maximum(0.0, np.log2(4096 / (space["micro_batch"] * space.base.context_tokens)))
    return np.asarray(peak * longer * traffic * (1.0 + 0.05 * small))
