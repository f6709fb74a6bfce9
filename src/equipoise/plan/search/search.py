"""Search the space of choices: bounds first, prices for what no bound rules out, best first.

Why
    The first good answer comes within a second, and what is left to gain is known at any time:
    the least bound of all that was not priced. A search that is stopped is an answer with a gap.

What it decides
    Choices wait in one queue by the least that they can take: first by ``plan.bounds.choices``,
    over all rows; then by the looks of ``plan.search.estimate``, closer and closer.
    ``plan.search.climb`` finds a good one to begin with, ``plan.search.dive`` a better one. What
    comes out of the queue and cannot be ``gap`` faster than the best is never looked at again, nor
    is anything behind it.

    A few that are first in the queue are looked at together, by all cores (``plan.search.team``).
    Which ones does not depend on how many cores there are, so neither does the answer.

    With documents, a choice is priced on the pipeline that has most work of one packed step; the
    best four then on the four that have most.

    Where time is limited, recipes are priced before anything else (``plan.search.seeds``). They are
    set aside, so a search that ends by itself ends as it would without them, and are among the
    answers of one that is stopped, also in the middle of a look (``plan.search.deadline``).

Kept true (tests/unit/plan/search/test_search.py, by Hypothesis)
    On small spaces the answer is within ``gap`` of pricing every row; the same seed gives the same
    answer; a stopped search that is resumed ends as one that was not; more memory is never slower;
    no look begins after the deadline; no seed is faster than a stopped search's answer.

Sources
    Best-first branch and bound: Lawler and Wood, Operations Research 14(4), 1966. Measured prices
    in place of formulas, penalties for what does not fit: the Frontier study, arXiv:2312.12705.
"""

import functools
import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.plan.bounds.choices import least_seconds, needed_bytes
from equipoise.plan.search.climb import climb
from equipoise.plan.search.deadline import Clock, Deadline, TimeOver
from equipoise.plan.search.dive import dive
from equipoise.plan.search.estimate import Estimates, Opened
from equipoise.plan.search.outcome import Outcome, Priced, Progress, Reached
from equipoise.plan.search.packs import Packer
from equipoise.plan.search.seeds import find_seeds
from equipoise.plan.search.stage import BOUNDED, FAMILY, GROUP, OWN, ROW, SPLIT, Item
from equipoise.plan.search.tally import Tally
from equipoise.plan.search.team import Home, Team, spare_cores
from equipoise.plan.space.alike import group_alike
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import Space
from equipoise.schedule.compiled import compile_loop
from equipoise.schedule.pipeline.sweep import fill, sweep
from equipoise.sim.divided import DividedStep, require_whole
from equipoise.sim.machine import Machine
from equipoise.sim.parts import StepParts
from equipoise.sim.step import Documents, StepRun, run_step
from equipoise.spec.model.presets import ModelSpec

_HINTS = 6
"""Choices that are best with full windows, priced first with documents."""

_HINT_SHARE = 0.5
"""Of the time, for full windows."""

_SEED_SHARE = 0.5
"""The share of the time for recipes."""

_DIVES = 24
"""Families that are priced as soon as all are bounded by their kernels."""

_KERNELS = ("tp", "cp", "micro_batch", "ep", "etp")
"""What says which kernels run."""

_LARGE = 50_000
"""Choices of which so many are replayed that the compiler is loaded for them, and cores shared."""

_LOOKS = {GROUP: "open_group", FAMILY: "family_s", ROW: "split_s", SPLIT: "own_s", OWN: "price"}
"""What is asked next of what waits in the queue."""

_WEIGHTS = {GROUP: 8, FAMILY: 1, BOUNDED: 0, ROW: 1, SPLIT: 4, OWN: 64}
"""How long that takes, about."""

_AT_ONCE = 512
"""Weight of the looks that are taken together, before the queue is looked at again."""


@dataclass(slots=True)
class Search:
    """One search; ``run`` may be called again after it was stopped."""

    model: ModelSpec
    machine: Machine
    space: Space
    packer: Packer | None = None
    gap: float = 0.01
    known: dict[int, Priced] = field(default_factory=dict)
    """Priced before."""
    note: Callable[[Priced], None] | None = None
    """Told of each choice that is priced."""
    beats_s: float = np.inf
    """A price from elsewhere: what is not ``gap`` faster is not looked for."""
    too_large: list[Ints] = field(default_factory=list)
    """Rows that do not fit, though a bound of all rows left them."""
    clock: Clock = time.monotonic
    estimates: Estimates = field(init=False)
    _members: list[Ints] = field(default_factory=list)
    """Rows of each group, then of each family."""
    _was_stopped: bool = False
    """In a look, whose caches may be half filled."""

    def __post_init__(self) -> None:
        self.estimates = Estimates(self.model, self.machine, self.space, self.packer)

    def run(
        self, *, seconds: float = np.inf, watch: Callable[[Progress], None] | None = None
    ) -> Outcome:
        """Search until nothing can be ``gap`` faster, or the time is over.

        Args:
            seconds: The most to take; what is found by then is the answer.
            watch: Told how far the search is after each price.
        """
        due = Deadline.after(seconds, self.clock)
        if self._was_stopped:
            self._forget()
        self.too_large.clear()
        tally = Tally(self.known, self._price, self.machine.capacity_bytes, watch, self.beats_s)
        seeds: list[Priced] = []
        if np.isfinite(seconds):
            part = due.part(_SEED_SHARE)
            self._try(part, lambda: self._price_seeds(seeds, part))
        reached = Reached()
        self._try(due, lambda: self._run(tally, reached, due))
        if not reached.is_done:
            for priced in seeds:
                if priced.row not in self.known:
                    self._remember(priced)
                tally.price(priced.row, reached.bound_s)
        listed = len(self.space)
        return tally.outcome(
            reached.bound_s,
            listed=listed,
            ruled_out=0 if reached.rows is None else listed - reached.rows,
            bounded=reached.bounded,
            least_bytes=reached.least_bytes,
        )

    def _run(self, tally: Tally, reached: Reached, due: Deadline) -> None:
        """Search; what was reached is written down on the way."""
        is_large = len(self.space) >= _LARGE
        if is_large:
            for loop in (sweep, fill):
                compile_loop(loop)
        of_all, packs = (self.model, self.machine, self.space), self.packer is not None
        needs = needed_bytes(*of_all, has_documents=packs)
        capacity = self.machine.capacity_bytes
        rows = np.flatnonzero(needs <= capacity)
        reached.rows, reached.least_bytes = len(rows), float(needs.min())
        about = needed_bytes(*of_all)[rows] if packs else needs[rows]
        peak = least_seconds(*of_all, has_documents=packs)[rows]
        reached.bound_s = float(peak.min(initial=np.inf))
        queue = self._groups(rows, peak)
        with Team(self.estimates.answer, spare_cores() if is_large else 0) as team:
            self._begin(tally, team, rows, about / capacity, peak, due)
            self._best_first(queue, tally, team, reached, due)
        reached.rows -= sum(map(len, self.too_large))

    def _try(self, due: Deadline, call: Callable[[], None]) -> None:
        """Call until time is over, wherever that is."""
        try:
            with due.stops():
                call()
        except TimeOver:
            self._was_stopped = True

    def _forget(self) -> None:
        """Begin with empty caches."""
        self.estimates = Estimates(self.model, self.machine, self.space, self.packer)
        self._was_stopped = False

    def _price_seeds(self, priced: list[Priced], due: Deadline) -> None:
        """The first choice of each recipe that fits, as far as there is time.

        With documents, of those few recipes that are best with full windows.
        """
        packs = self.packer is not None
        recipes = find_seeds(self.model, self.machine, self.space, has_documents=packs)
        if packs:
            recipes = self._best_with_windows(recipes, due)
        while recipes:
            again = []
            for row, *others in recipes:
                if due.is_over():
                    return
                each = self.known.get(row) or self._replay(row)
                if each is not None and each.memory_bytes <= self.machine.capacity_bytes:
                    priced.append(each)
                elif others:
                    again.append(others)
            recipes = again

    def _best_with_windows(self, recipes: list[list[int]], due: Deadline) -> list[list[int]]:
        """Recipes without what does not fit with full windows, the best few of them."""
        timed: list[tuple[float, list[int]]] = []
        windows = due.part(_HINT_SHARE)
        for rows in recipes:
            for at, row in enumerate(rows):
                if windows.is_over():
                    break
                window_s = self.estimates.window_s(row)
                if np.isfinite(window_s):
                    timed.append((window_s, rows[at:]))
                    break
        return [rows for _, rows in sorted(timed)[:_HINTS]] or recipes

    def documents(self, choice: Choice) -> Documents | DividedStep:
        """Micro-batches of every data-parallel rank, those with most work first."""
        return self.estimates.packs.documents(choice)

    def whole_documents(self, choice: Choice) -> Documents:
        """The documents of the pipeline that decides how long a step takes.

        Raises:
            LayoutError: the choice's policy divides documents.
        """
        return require_whole(self.estimates.packs.heaviest(choice))

    def parts(self, choice: Choice) -> StepParts:
        """Prices of its micro-batches."""
        return self.estimates.parts(choice)

    def replay(self, choice: Choice) -> StepRun:
        """The step as it was priced: with documents, on the pipeline that has most work."""
        layout, options = choice.layout, choice.options
        documents, parts = self.estimates.packs.heaviest(choice), self.parts(choice)
        of_all = self.model, self.machine, layout, options
        return run_step(*of_all, documents=documents, parts=parts)

    def _begin(
        self, tally: Tally, team: Team, rows: Ints, memory: Floats, peak: Floats, due: Deadline
    ) -> None:
        """Find a good choice: with documents, what is good with full windows, which soon is."""
        lowest = float(peak.min(initial=np.inf))
        windows: dict[int, float] = {}
        climb_due = due if self.packer is None else due.part(_HINT_SHARE)

        def price(some: list[int]) -> list[float]:
            self._look(team, tally, [(lowest, OWN, row) for row in some])
            return [tally.fitting_s(row) for row in some]

        def price_windows(some: list[int]) -> list[float]:
            homes = [tuple(int(self.space[name][row]) for name in _KERNELS) for row in some]
            asked = [("window_s", row) for row in some]
            found = team.ask(asked, [(home,) for home in homes], [1.0] * len(some))
            windows.update(zip(some, found, strict=True))
            return found

        climb(
            self.space,
            rows,
            memory,
            peak,
            price if self.packer is None else price_windows,
            climb_due.is_over,
        )
        hints = [row for row in windows if np.isfinite(windows[row])]
        hints = sorted(hints, key=lambda row: (windows[row], row))[:_HINTS]
        self._look(team, tally, [(lowest, OWN, row) for row in hints])

    def _groups(self, rows: Ints, peak: Floats) -> list[Item]:
        """A queue of rows that run the same kernels, by the least bound of each group."""
        names = (*_KERNELS, *(["dp", "policy"] if self.packer is not None else []))
        columns = [self.space[name][rows] for name in names]
        if self.packer is not None:  # where ranks meet in each turn, other documents are packed
            columns.append((self.space["zero"][rows] >= 2).astype(np.int64))
        groups = group_alike(columns)
        self._members = [rows[group] for group in groups]
        queue = [(float(peak[group].min()), GROUP, at) for at, group in enumerate(groups)]
        heapq.heapify(queue)
        return queue

    def _best_first(
        self, queue: list[Item], tally: Tally, team: Team, reached: Reached, due: Deadline
    ) -> None:
        """Look closer at what is first, until the best cannot be beaten by ``gap``."""
        passed, has_dived = np.inf, False
        while queue:
            limit = tally.best_s * (1 - self.gap)
            reached.bound_s = min(queue[0][0], passed)
            if queue[0][0] >= limit:
                break
            if due.is_over():
                return
            if queue[0][1] != GROUP and not has_dived:  # no group is before all families
                reached.bounded += self._dive(queue, tally, team, due)
                has_dived = True
                continue
            items = self._first(queue, limit, only_groups=not has_dived)
            reached.bounded += sum(stage == FAMILY for _, stage, _ in items)
            for item, answer in zip(items, self._look(team, tally, items), strict=True):
                passed = min(passed, self._queue(queue, item, answer))
        reached.bound_s = min(queue[0][0] if queue else np.inf, passed)
        reached.is_done = True

    def _first(self, queue: list[Item], limit: float, *, only_groups: bool) -> list[Item]:
        """What is looked at next, together; families that were bounded become rows."""
        items: list[Item] = []
        weight = 0
        while queue and queue[0][0] < limit and weight < _AT_ONCE:
            if only_groups and queue[0][1] != GROUP:
                break
            bound, stage, at = heapq.heappop(queue)
            if stage == BOUNDED:
                for row in self._members[at].tolist():
                    heapq.heappush(queue, (bound, ROW, row))
            else:
                items.append((bound, stage, at))
            weight += _WEIGHTS[stage]
        return items

    def _dive(self, queue: list[Item], tally: Tally, team: Team, due: Deadline) -> int:
        """Bound all families that are known best, and price the best of them."""
        look = functools.partial(self._look, team, tally)
        limit = tally.best_s * (1 - self.gap)
        count = dive(queue, self._members, self.space, look, limit, due.is_over)
        best = sorted(each for each in queue if each[1] == BOUNDED)[:_DIVES]
        rows = [(least, OWN, int(self._members[at][0])) for least, _, at in best]
        size = _AT_ONCE // _WEIGHTS[OWN]
        for these in (rows[at : at + size] for at in range(0, len(rows), size)):
            limit = tally.best_s * (1 - self.gap)
            if not due.is_over():
                self._look(team, tally, [item for item in these if item[0] < limit])
        return count

    def _look(self, team: Team, tally: Tally, items: Sequence[Item]) -> list[Any]:
        """One look at each item; those that are priced are counted."""
        limit = tally.best_s * (1 - self.gap)
        answers: list[Any] = [0.0] * len(items)
        asked, homes, weights, places = [], [], [], []
        for place, (bound, stage, at) in enumerate(items):
            row = at if stage > BOUNDED else int(self._members[at][0])
            if stage > BOUNDED and row in self.known:
                continue
            subject = (self._members[at], bound, limit) if stage == GROUP else (row,)
            asked.append((_LOOKS[stage], *subject))
            homes.append(self._home(row, is_opened=stage != GROUP))
            weights.append(_WEIGHTS[stage])
            places.append(place)
        for place, answer in zip(places, team.ask(asked, homes, weights), strict=True):
            answers[place] = answer
            if isinstance(answer, Priced):
                self._remember(answer)
        for bound, stage, at in items:
            if stage == OWN and at in self.known:
                tally.price(at, bound)
        return answers

    def _home(self, row: int, *, is_opened: bool) -> Home:
        """Who packs the same documents; and shares the same layers out over context ranks."""
        packed, shared = (
            tuple(int(self.space[name][row]) for name in names)
            for names in (("dp", "micro_batch", "policy"), ("tp", "cp", "context_strategy"))
        )
        return (packed, shared) if is_opened else (packed,)

    def _queue(self, queue: list[Item], item: Item, answer: Any) -> float:
        """Queue what was looked at, for its next look; the least bound of what is left out."""
        bound, stage, at = item
        if isinstance(answer, Opened):
            self.too_large.append(answer.too_large)
            for tighter, family in answer.families:
                heapq.heappush(queue, (tighter, FAMILY, len(self._members)))
                self._members.append(family)
            return answer.others_s
        if stage < OWN:
            heapq.heappush(queue, (max(bound, answer), stage + 1, at))
        return float(np.inf)

    def _price(self, row: int) -> Priced | None:
        if row not in self.known:
            priced = self._replay(row)
            if priced is None:
                return None
            self._remember(priced)
        return self.known[row]

    def _replay(self, row: int) -> Priced | None:
        return self.estimates.price(row)

    def _remember(self, priced: Priced) -> None:
        self.known[priced.row] = priced
        if self.note is not None:
            self.note(priced)
