"""Search what host memory makes fit, after all that fits without it.

Why
    Offloading makes no choice faster: it waits for copies and for the host's update. So a choice
    that fits is better as it is, and one that fits only with offloading has to beat the best that
    fits without. Searched together they would be four times as many; so they are few.

What it decides
    Which choices are searched with offloading: those that a search without has left as too large,
    by bound or by price, and that could be faster than its best. What it left for its time has a
    bound, which holds with offloading, too. Rows of the answer are numbered as ``Space.choice``
    reads them.

Kept true (tests/unit/plan/search/test_offload.py)
    On random choices the step with offloading is never faster; on small spaces the answer is that
    of pricing every choice with every offloading.

Sources
    Dominance in enumeration: Ibaraki, Journal of the ACM 24(2), 1977.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np

from equipoise.base.arrays import Flags, Ints
from equipoise.plan.bounds.choices import least_bytes, least_seconds, needed_bytes
from equipoise.plan.search.deadline import Deadline
from equipoise.plan.search.outcome import Outcome, Priced, Progress
from equipoise.plan.search.search import Search
from equipoise.plan.space.columns import Space
from equipoise.spec.offload import OFFLOADS


def search_offloaded(
    search: Search,
    outcome: Outcome,
    *,
    seconds: float = np.inf,
    watch: Callable[[Progress], None] | None = None,
    may: Callable[[Space], Flags] | None = None,
) -> Outcome:
    """Go on with what does not fit without offloading.

    Args:
        search: Of choices that offload nothing; learns what is priced.
        outcome: What it found.
        seconds: The most to take.
        watch: Told how far the search is.
        may: Which of some choices are to be searched; all unless given.

    Returns:
        The outcome of both.
    """
    due = Deadline.after(seconds, search.clock)
    listed = due.attempt(partial(_list_offloaded, search, outcome, may))
    if listed is None:
        return dataclasses.replace(
            outcome, progress=dataclasses.replace(outcome.progress, bound_s=0.0)
        )
    places, space, least = listed
    if not len(places):
        return dataclasses.replace(outcome, least_bytes=min(outcome.least_bytes, least))
    place_of = {place: at for at, place in enumerate(places.tolist())}
    known = {
        place_of[place]: dataclasses.replace(priced, row=place_of[place])
        for place, priced in search.known.items()
        if place in place_of
    }

    def note(priced: Priced) -> None:
        here = _numbered(priced, places)
        search.known[here.row] = here
        if search.note is not None:
            search.note(here)

    packer = None if search.packer is None else search.documents
    after = type(search)(
        *(search.model, search.machine, space, packer, search.gap, known, note),
        beats_s=outcome.progress.best_s,
        clock=search.clock,
    )
    found = after.run(seconds=due.left_s, watch=watch)
    fitting = (*outcome.fitting, *(_numbered(each, places) for each in found.fitting))
    bound_s = min(outcome.progress.bound_s, found.progress.bound_s)
    return Outcome(
        tuple(sorted(fitting, key=lambda each: (each.step_s, each.row))),
        Progress(len(search.known), found.progress.best_s, bound_s),
        outcome.listed + found.listed,
        outcome.ruled_out + found.ruled_out,
        outcome.bounded + found.bounded,
        min(outcome.least_bytes, found.least_bytes),
    )


def _list_offloaded(
    search: Search, outcome: Outcome, may: Callable[[Space], Flags] | None
) -> tuple[Ints, Space, float]:
    """Numbers of choices that may pay, int64 [n], those choices, and the least of all needs."""
    model, machine, space = search.model, search.machine, search.space
    capacity = machine.capacity_bytes
    packs = search.packer is not None
    is_large = least_bytes(model, space, has_documents=packs) > capacity
    tried = [each.row for each in search.known.values() if each.memory_bytes > capacity]
    is_large[[row for row in tried if row < len(space)]] = True
    for rows in search.too_large:
        is_large[rows] = True
    rows = np.flatnonzero(is_large)
    large = space.keep(rows)
    soonest = least_seconds(model, machine, large, has_documents=packs)
    is_near = soonest < outcome.progress.best_s * (1 - search.gap)
    rows, large = rows[is_near], large.keep(is_near)
    places, kinds, least = [], [], np.inf
    for kind in range(1, len(OFFLOADS)):
        those = Space(large.columns | {"offload": np.full(len(rows), kind)}, space.base)
        needs = needed_bytes(model, machine, those, has_documents=packs)
        if may is not None:
            needs[~may(those)] = np.inf
        least = min(least, float(needs.min(initial=np.inf)))
        fits = needs <= capacity
        places.append(kind * len(space) + rows[fits])
        kinds.append(those.keep(fits))
    columns = {name: np.concatenate([each[name] for each in kinds]) for name in space.columns}
    return np.concatenate(places), Space(columns, space.base), least


def _numbered(priced: Priced, places: Ints) -> Priced:
    return dataclasses.replace(priced, row=int(places[priced.row]))
