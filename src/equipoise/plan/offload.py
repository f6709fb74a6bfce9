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

Kept true (tests/unit/plan/test_offload.py)
    On random choices the step with offloading is never faster; on small spaces the answer is that
    of pricing every choice with every offloading.

Sources
    Dominance in enumeration: Ibaraki, Journal of the ACM 24(2), 1977.
"""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from equipoise.plan.bound import least_bytes, least_host_bytes, least_seconds, needed_bytes
from equipoise.plan.outcome import Outcome, Priced, Progress
from equipoise.plan.search import Search
from equipoise.plan.space import Ints, Space
from equipoise.spec.offload import OFFLOADS


def search_offloaded(
    search: Search,
    outcome: Outcome,
    *,
    seconds: float = np.inf,
    watch: Callable[[Progress], None] | None = None,
) -> Outcome:
    """Go on with what does not fit without offloading.

    Args:
        search: Of choices that offload nothing; learns what is priced.
        outcome: What it found.
        seconds: The most to take.
        watch: Told how far the search is.

    Returns:
        The outcome of both.
    """
    begin = time.monotonic()
    places, space = _list_offloaded(search, outcome)
    if not len(places):
        return dataclasses.replace(outcome, host_bytes=_least_host(search))
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
    )
    found = after.run(seconds=max(0.0, seconds - (time.monotonic() - begin)), watch=watch)
    fitting = (*outcome.fitting, *(_numbered(each, places) for each in found.fitting))
    bound_s = min(outcome.progress.bound_s, found.progress.bound_s)
    priced = outcome.progress.priced + found.progress.priced
    return Outcome(
        tuple(sorted(fitting, key=lambda each: (each.step_s, each.row))),
        Progress(priced, found.progress.best_s, bound_s),
        outcome.listed + found.listed,
        outcome.ruled_out + found.ruled_out,
        outcome.bounded + found.bounded,
        min(outcome.least_bytes, found.least_bytes),
        0.0 if fitting else _least_host(search),
    )


def _list_offloaded(search: Search, outcome: Outcome) -> tuple[Ints, Space]:
    """Choices that may pay, and their numbers in the space of the search, int64 [n]."""
    model, machine, space = search.model, search.machine, search.space
    capacity = machine.capacity_bytes
    is_large = least_bytes(model, space) > capacity
    tried = [each.row for each in search.known.values() if each.memory_bytes > capacity]
    is_large[[row for row in tried if row < len(space)]] = True
    rows = np.flatnonzero(is_large)
    large = space.keep(rows)
    least = least_seconds(model, machine, large, has_documents=search.packer is not None)
    is_near = least < outcome.progress.best_s * (1 - search.gap)
    rows, large = rows[is_near], large.keep(is_near)
    places, kinds = [], []
    for kind in range(1, len(OFFLOADS)):
        those = Space(large.columns | {"offload": np.full(len(rows), kind)}, space.base)
        fits = needed_bytes(model, machine, those) <= capacity
        places.append(kind * len(space) + rows[fits])
        kinds.append(those.keep(fits))
    columns = {name: np.concatenate([each[name] for each in kinds]) for name in space.columns}
    return np.concatenate(places), Space(columns, space.base)


def _numbered(priced: Priced, places: Ints) -> Priced:
    return dataclasses.replace(priced, row=int(places[priced.row]))


def _least_host(search: Search) -> float:
    """Host memory that the smallest needs of those that would fit the device; else 0."""
    model, space = search.model, search.space
    both = np.full(len(space), OFFLOADS.index("both"))
    whole = Space(space.columns | {"offload": both}, space.base)
    fits = least_bytes(model, whole) <= search.machine.capacity_bytes
    return float(least_host_bytes(model, whole)[fits].min(initial=np.inf)) if fits.any() else 0.0
