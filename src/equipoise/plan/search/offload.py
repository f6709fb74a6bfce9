"""Dominance: what host memory makes fit is searched after everything that fits without it.

Why
    Offloading makes no choice faster: it waits for copies and for the host's update. So a choice
    that fits dominates itself with offloading, and one that fits only with offloading has to beat
    the incumbent. Searched together they would be four times as many.

What it decides
    Which choices are searched with offloading: those that the search without pruned as too large,
    by bound or by price, and whose bound is below its incumbent. What was pruned as too slow has a
    bound that also holds with offloading. Rows of the answer are numbered as ``Space.choice`` reads
    them.

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
from equipoise.plan.bounds.roofline import memory_bound_bytes, needed_bytes, peak_bound_s
from equipoise.plan.search.deadline import Deadline
from equipoise.plan.search.heuristics import recipe_rows
from equipoise.plan.search.incumbent import Outcome, Priced, SearchProgress
from equipoise.plan.search.search import Search
from equipoise.plan.search.vast import least_peak_s
from equipoise.plan.space.columns import Space
from equipoise.plan.space.lattice import Lattice
from equipoise.spec.offload import OFFLOADS


def search_offloaded(
    search: Search,
    outcome: Outcome,
    *,
    seconds: float = np.inf,
    watch: Callable[[SearchProgress], None] | None = None,
    may: Callable[[Space], Flags] | None = None,
) -> Outcome:
    """Search what does not fit without offloading.

    Args:
        search: A search of choices that offload nothing; learns what is priced.
        outcome: Its answer.
        seconds: The most to take.
        watch: Receives the progress after each price.
        may: Which choices of a space may be searched; all unless given.

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
    after = (Search if isinstance(search.space, Lattice) else type(search))(
        *(search.model, search.machine, space, packer, search.gap, known, note),
        beats_s=outcome.progress.best_s,
        clock=search.clock,
    )
    offloaded = after.run(seconds=due.left_s, watch=watch)
    fitting = (*outcome.fitting, *(_numbered(each, places) for each in offloaded.fitting))
    bound_s = min(outcome.progress.bound_s, offloaded.progress.bound_s)
    if isinstance(search.space, Lattice):
        of_all = search.model, search.machine, search.space
        bound_s = min(bound_s, least_peak_s(*of_all, packs=search.packer is not None))
    return Outcome(
        tuple(sorted(fitting, key=lambda each: (each.step_s, each.row))),
        SearchProgress(len(search.known), offloaded.progress.best_s, bound_s),
        outcome.listed + offloaded.listed,
        outcome.ruled_out + offloaded.ruled_out,
        outcome.bounded + offloaded.bounded,
        min(outcome.least_bytes, offloaded.least_bytes),
    )


def _list_offloaded(
    search: Search, outcome: Outcome, may: Callable[[Space], Flags] | None
) -> tuple[Ints, Space, float]:
    """Numbers of choices that may pay, int64 [n], those choices, and the least of all needs."""
    model, machine, every = search.model, search.machine, search.space
    capacity = machine.capacity_bytes
    packs = search.packer is not None
    numbers = np.arange(len(every)) if isinstance(every, Space) else recipe_rows(every)
    space = every.keep(numbers)
    is_large = memory_bound_bytes(model, space, has_documents=packs) > capacity
    tried = [each.row for each in search.known.values() if each.memory_bytes > capacity]
    is_large |= np.isin(numbers, tried)
    for rows in search.too_large:
        is_large[rows] = True
    large, rows = space.keep(is_large), numbers[is_large]
    soonest = peak_bound_s(model, machine, large, has_documents=packs)
    is_near = soonest < search.cutoff_s(outcome.progress.best_s)
    rows, large = rows[is_near], large.keep(is_near)
    places, kinds, least = [], [], np.inf
    for kind in range(1, len(OFFLOADS)):
        those = Space(large.columns | {"offload": np.full(len(rows), kind)}, space.base)
        needs = needed_bytes(model, machine, those, has_documents=packs)
        if may is not None:
            needs[~may(those)] = np.inf
        least = min(least, float(needs.min(initial=np.inf)))
        fits = needs <= capacity
        places.append(kind * len(every) + rows[fits])
        kinds.append(those.keep(fits))
    columns = {name: np.concatenate([each[name] for each in kinds]) for name in space.columns}
    return np.concatenate(places), Space(columns, space.base), least


def _numbered(priced: Priced, places: Ints) -> Priced:
    return dataclasses.replace(priced, row=int(places[priced.row]))
