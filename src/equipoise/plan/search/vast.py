"""Branch and bound over a lattice: the first good answer in seconds, whatever its size.

Why
    Where there are tens of millions of choices, listing them takes longer than an answer may, and
    more memory than a laptop has. Their bounds need no list.

What it decides
    The root branches into cells that run the same kernels. These wait by their kernels' time, and
    only those that may beat the incumbent are surveyed (``plan.search.survey``); from there on
    every node is one of ``plan.search.search``.

    The incumbent comes before any bound. The first answer is the likeliest of what is near a
    recipe, or of a sample, and is priced before the compiler is loaded, which takes longer. Then
    come the published recipes of the model, warm starts and local search among the choices that
    recipes differ in, and local search among all choices of the best cells. Unlike those of a small
    space they stay, so that no answer is worse than a recipe.

Kept true (tests/unit/plan/search/test_vast.py)
    On small spaces the answer is that of pricing every row; the bound holds at every moment; no
    seed that fits is faster than the answer.

Sources
    As ``plan.search.search``.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.plan.bounds.roofline import memory_guess_bytes, needed_bytes, peak_bound_s
from equipoise.plan.search.deadline import Deadline
from equipoise.plan.search.evaluate import Estimates
from equipoise.plan.search.heuristics import (
    climb,
    guess_s,
    recipe_rows,
    scattered,
    sums_each,
    waiting,
)
from equipoise.plan.search.incumbent import Incumbent, Node, Reached
from equipoise.plan.search.near import likeliest, near_rows
from equipoise.plan.search.search import FAMILY, KERNELS, OWN, ROW, SPLIT, Search
from equipoise.plan.search.survey import Survey, VastEstimates
from equipoise.plan.search.team import Home, Team, spare_cores
from equipoise.plan.space.columns import Space, group_equal
from equipoise.plan.space.lattice import Lattice
from equipoise.schedule.compiled import compile_loop
from equipoise.schedule.pipeline.sweep import fill, sweep
from equipoise.sim.machine import Machine
from equipoise.spec.model.presets import ModelSpec

VAST = 150_000
"""From this many choices on, a space is not listed."""

LOOK, SURVEY, BLOCK = -3, -2, -1
"""How tightly nodes are bounded that come before a family: cells by nothing, by their kernels;
choices of a survey by what is cheap."""

_QUESTIONS = {LOOK: "kernels_s", SURVEY: "survey", BLOCK: "tighten", FAMILY: "family_s"}
_QUESTIONS |= {ROW: "split_s", SPLIT: "own_s", OWN: "price"}
_WEIGHTS = {LOOK: 8, SURVEY: 128, BLOCK: 32, FAMILY: 1, ROW: 1, SPLIT: 4, OWN: 64}
_TIGHTENED = 64
"""Choices of a survey that are tightened at a time."""
_STARTS, _MOST_STARTS = 16, 96
"""Warm starts that are priced together, and as many again while they get better; and at most."""
_LOOKS, _FIRST_LOOKS = 160, 64
"""Kernels that are priced before some choices are guessed, and before the first answer."""
_SAMPLE = 16_384
"""The most choices that are columns for the first answer."""
_AT_FIRST, _MOST_FIRST = 4, 12
"""Choices that are priced together for the first answer, and at most."""
_COMPILES_S = 2.0
"""What has to be left for the compiler to be worth loading [s]."""
_FULL, _TOO_LARGE = 1.3, 4.0
"""How much slower a choice is guessed to be that may not fit, or hardly will."""
_ROOM = 0.93
"""Share of the memory from which on a guess leaves no room for what it does not count."""
_COMMON = 400_000
"""The most choices that are columns for the local search."""
_BEST = 4
"""Cells whose choices are all looked at by the local search."""
_BEAM = 2
"""Choices that are moved from, near the incumbent."""
_NEAR_SHARE, _SEED_SHARE, _CLIMB_SHARE = 0.2, 0.15, 0.2
"""Shares of the time for local search near a recipe, for warm starts, and of what is left for local
search among likely choices."""
_NEAR_S, _SEED_S, _CLIMB_S = 0.5, 0.3, 1.5
"""What each gets at least, for in a short time an answer is worth more than a bound [s]."""


@dataclass(frozen=True, slots=True, eq=False)
class _Likely:
    """Some rows that may fit."""

    space: Space
    rows: Ints
    """Their numbers in the lattice, int64 [n]."""
    memory: Floats
    """A guess of their memory over what a device has, float64 [n]."""
    guess: Floats
    """And of their time, float64 [n] [s]."""


def _part(due: Deadline, share: float, least_s: float) -> Deadline:
    """A share of what is left, and at least some seconds of it."""
    left_s = max(due.left_s, 1e-9)
    return due.part(max(share, min(1.0, least_s / left_s)))


def _doubt(memory: Floats) -> Floats:
    """How much slower choices count that may not fit, by a guess of their share of the memory."""
    return np.where(memory > 1.0, _TOO_LARGE, np.where(memory > _ROOM, _FULL, 1.0))


def _differing(likely: _Likely, each: int, most: int) -> Iterator[list[int]]:
    """Places of the likeliest that differ in a degree or in recomputation, some at a time."""
    order = np.argsort(likely.guess, kind="stable")
    names = ("tp", "cp", "pp", "ep", "zero", "recompute")
    codes = np.stack([likely.space[name][order] for name in names])
    ranked = order[np.sort(np.unique(codes, axis=1, return_index=True)[1])]
    # Guesses know little of what travels: those that shard weights take turns with the others.
    shards = likely.space["zero"][ranked] == 3
    turn = np.where(shards, np.cumsum(shards), np.cumsum(~shards))
    places = ranked[np.argsort(turn, kind="stable")][:most].tolist()
    for at in range(0, len(places), each):
        yield places[at : at + each]


def least_peak_s(model: ModelSpec, machine: Machine, lattice: Lattice, *, packs: bool) -> float:
    """Lower bound of every choice: all useful FLOP at the devices' peak [s]."""
    one = lattice.keep(lattice.firsts[:1])
    alone = {"recompute": one["recompute"] * 0, "pp": one["pp"] // one["pp"]}
    alone["dp"] = one["dp"] * one["pp"]
    space = Space(one.columns | alone, lattice.base)
    return float(peak_bound_s(model, machine, space, has_documents=packs)[0])


Ask = Callable[[list[int]], list[float]]
"""Seconds of some rows; infinite of one that does not fit."""


@dataclass(slots=True)
class VastSearch(Search):
    """A search of a lattice."""

    published: tuple[int, ...] = ()
    """Numbers of published recipes, priced first."""
    _cells: list[Ints] = field(default_factory=list)
    """Cells of each group."""
    _surveys: list[tuple[Survey, int]] = field(default_factory=list)
    """And how many of its choices were tightened."""
    _looked: dict[int, float] = field(default_factory=dict)
    """Kernels' bound of some groups [s]."""
    _group_of: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Group of each cell, int64 [cells]."""
    _at_once: int = _STARTS
    """Choices that are priced together: few without a compiler, as a stop loses all of them."""

    @property
    def lattice(self) -> Lattice:
        """The space."""
        return cast(Lattice, self.space)

    @property
    def _node(self) -> int:
        """Devices of a node."""
        return min(each.devices_per_node for each in self.machine.cluster.classes)

    def _make_estimates(self) -> Estimates:
        return VastEstimates(self.model, self.machine, self.lattice, self.packer)

    def _price_seeds(self, priced: list[Any], due: Deadline) -> None:
        """Seeds are priced in ``_run``, whose incumbents they are."""

    def _run(self, best: Incumbent, reached: Reached, due: Deadline) -> None:
        """Search until nothing can be ``gap`` faster, or the time is over."""
        lattice = self.lattice
        reached.rows, reached.bound_s = len(lattice), self._peak_s()
        names = [lattice.cells[name] for name in KERNELS]
        names += [lattice.cells["dp"]] if self.packer is not None else []
        self._cells, self._surveys, self._looked = group_equal(names), [], {}
        self._group_of = np.empty(len(lattice.cells["tp"]), dtype=np.int64)
        for at, cells in enumerate(self._cells):
            self._group_of[cells] = at
        frontier: list[Node] = [(reached.bound_s, LOOK, at) for at in range(len(self._cells))]
        with Team(self.estimates.answer, 0) as alone:
            self._first(best, alone, reached.bound_s)
        self._at_once = _AT_FIRST
        if due.left_s > _COMPILES_S:
            self._at_once = _STARTS
            for loop in (sweep, fill):
                compile_loop(loop)
        with Team(self.estimates.answer, spare_cores()) as team:
            self._start(best, team, reached, due)
            for at, bound in self._looked.items():
                frontier[at] = (max(reached.bound_s, bound), SURVEY, at)
            frontier = [node for node in frontier if node[0] < np.inf]
            heapq.heapify(frontier)
            self._best_first(frontier, best, team, reached, due)

    def _peak_s(self) -> float:
        """All useful FLOP at the devices' peak [s]."""
        return least_peak_s(self.model, self.machine, self.lattice, packs=self.packer is not None)

    def _ask(self, best: Incumbent, team: Team, lowest: float) -> Ask:
        """What prices rows."""

        def price(rows: list[int]) -> list[float]:
            self._evaluate(team, best, [(lowest, OWN, row) for row in rows])
            return [best.fitting_s(row) for row in rows]

        return price

    def _first(self, best: Incumbent, team: Team, lowest: float) -> None:
        """An answer: the likeliest recipe and what is near it, else the likeliest of a sample."""
        price, recipes = self._ask(best, team, lowest), np.array(sorted(self.published), np.int64)
        likely = self._likely(team, best, recipes, looks=_FIRST_LOOKS)
        if len(likely.rows):
            start = int(likely.rows[np.argmin(likely.guess)])
            moves = near_rows(self.lattice, start)
            rows = np.unique(np.concatenate([recipes[:0], *moves]))
            likely = self._likely(team, best, rows, looks=_FIRST_LOOKS)
            near = likeliest(moves, likely.rows, likely.space, likely.guess)
            ranked = [start, *near.tolist()]
        else:
            rows = recipe_rows(self.lattice)
            rows = rows[:: -(-len(rows) // _SAMPLE)]
            likely = self._likely(team, best, rows, looks=_FIRST_LOOKS)
            first = next(_differing(likely, _MOST_FIRST, _MOST_FIRST), [])
            ranked = likely.rows[first].tolist()
        for at in range(0, min(len(ranked), _MOST_FIRST), _AT_FIRST):
            price(ranked[at : at + _AT_FIRST])
            if best.best_s < np.inf:
                break

    def _start(self, best: Incumbent, team: Team, reached: Reached, due: Deadline) -> None:
        """Published recipes, warm starts, and local search from them."""
        lattice, price = self.lattice, self._ask(best, team, reached.bound_s)
        price(list(self.published))
        if best.fitting:
            self._climb_near(team, best, price, _part(due, _NEAR_SHARE, _NEAR_S))
        rows = recipe_rows(lattice)
        common = self._likely(team, best, rows[:: -(-len(rows) // _COMMON)])
        start_due = _part(due, _SEED_SHARE, _SEED_S)
        climb_due = _part(due, _SEED_SHARE + _CLIMB_SHARE, _SEED_S + _CLIMB_S)
        before = np.inf
        for some in _differing(common, self._at_once, _MOST_STARTS):
            price(common.rows[some].tolist())
            if start_due.is_over() or (best.best_s < np.inf and best.best_s >= before):
                break
            before = best.best_s
        self._climb_among(common, price, climb_due)
        ranked = sorted(best.fitting, key=lambda row: (best.fitting_s(row), row))
        cells = list(dict.fromkeys(self._cell(row) for row in ranked))[:_BEST]
        if cells and not climb_due.is_over():
            near = lattice.rows_of(np.array(sorted(cells)))
            self._climb_among(self._likely(team, best, near), price, climb_due)

    def _climb_near(self, team: Team, best: Incumbent, price: Ask, due: Deadline) -> None:
        """Local search from the incumbent, among all choices."""
        moved = set[int]()
        while not due.is_over():
            ranked = sorted(best.fitting, key=lambda row: (best.fitting_s(row), row))
            start = next((row for row in ranked[:_BEAM] if row not in moved), None)
            if start is None:
                return
            moved.add(start)
            moves = near_rows(self.lattice, start)
            likely = self._likely(team, best, np.unique(np.concatenate(moves)))
            rows = likeliest(moves, likely.rows, likely.space, likely.guess).tolist()
            before = best.best_s
            for at in range(0, len(rows), self._at_once):
                price(rows[at : at + self._at_once])
                is_better = best.best_s < before and (at + self._at_once) % _STARTS == 0
                if due.is_over() or is_better:
                    break

    def _cell(self, row: int) -> int:
        return int(np.searchsorted(self.lattice.firsts, row, side="right")) - 1

    def _likely(self, team: Team, best: Incumbent, rows: Ints, *, looks: int = _LOOKS) -> "_Likely":
        """Those of some rows that may fit, with a guess of their time from their kernels'."""
        space, packs = self.lattice.keep(rows), self.packer is not None
        needs = needed_bytes(self.model, self.machine, space, has_documents=packs)
        fits = needs <= self.machine.capacity_bytes
        rows, space = rows[fits], space.keep(fits)
        of_all = self.model, self.machine, space
        peak = peak_bound_s(*of_all, has_documents=packs)
        memory = np.maximum(needs[fits], memory_guess_bytes(self.model, space))
        memory /= self.machine.capacity_bytes
        far = scattered(space, self._node) if self.model.experts else np.ones(len(space))
        rough = guess_s(space, peak) * far * _doubt(memory)
        group = self._group_of[np.searchsorted(self.lattice.firsts, rows, side="right") - 1]
        order = np.argsort(rough, kind="stable")
        first = np.unique(group[order], return_index=True)[1]
        wanted = [at for at in group[order][np.sort(first)].tolist() if at not in self._looked]
        wanted = wanted[:looks]
        nodes: list[Node] = [(0.0, LOOK, at) for at in wanted]
        self._looked |= dict(zip(wanted, self._evaluate(team, best, nodes), strict=True))
        known = np.full(len(self._cells), np.nan)
        known[list(self._looked)] = list(self._looked.values())
        least = float(peak.min(initial=np.inf))
        guess = known[group] * peak / least * waiting(space) * far
        guess *= np.where((space["zero"] == 3) & (space["pp"] > 1), 2.0, 1.0)
        guess *= np.where(sums_each(space), 1.05, 1.0)
        slower = np.nanmedian(guess / rough) if np.isfinite(guess).any() else 1.0
        guess = np.where(np.isfinite(guess), guess, rough * slower)
        return _Likely(space, rows, memory, guess * _doubt(memory))

    def _climb_among(self, likely: "_Likely", price: Ask, due: Deadline) -> None:
        """Local search among some rows."""

        def ask(some: list[int]) -> list[float]:
            return list(price(likely.rows[some].tolist()))

        places = np.arange(len(likely.rows))
        of_all = likely.space, places, likely.memory, likely.guess
        climb(*of_all, ask, due.is_over, guess=likely.guess)

    def _question(self, node: Node, cutoff: float) -> tuple[tuple[Any, ...], int]:
        """What to ask about a node, and a row of it."""
        bound, level, at = node
        if level in (LOOK, SURVEY):
            row = int(self.lattice.firsts[self._cells[at][0]])
            subject = (row,) if level == LOOK else (self._cells[at], bound, cutoff)
            return (_QUESTIONS[level], *subject), row
        if level == BLOCK:
            survey, done = self._surveys[at]
            some = slice(done, done + _TIGHTENED)
            return ("tighten", survey.rows[some], survey.bound_s[some]), int(survey.rows[done])
        return (_QUESTIONS[level], at), at

    def _branch(self, frontier: list[Node], node: Node, answer: Any, reached: Reached) -> float:
        """Push the branches of an evaluated node; returns the least bound of those pruned."""
        bound, level, at = node
        if level == LOOK:
            if np.isfinite(answer):
                heapq.heappush(frontier, (max(bound, answer), SURVEY, at))
        elif level == SURVEY:
            reached.rows = (reached.rows or 0) - answer.too_large
            reached.least_bytes = min(reached.least_bytes, answer.least_bytes)
            self._push_block(frontier, len(self._surveys), answer, 0)
            return float(answer.pruned_s)
        elif level == BLOCK:
            survey, done = self._surveys[at]
            for row, tight in zip(survey.rows[done:].tolist(), answer.tolist(), strict=False):
                if np.isfinite(tight):
                    heapq.heappush(frontier, (max(bound, tight), FAMILY, row))
            self._push_block(frontier, at, survey, done + len(answer))
        elif level == FAMILY:
            siblings = int(self.lattice.factors[-1].sizes[self._cell(at)])
            for row in range(at, at + siblings):
                heapq.heappush(frontier, (max(bound, answer), ROW, row))
        elif level < OWN:
            heapq.heappush(frontier, (max(bound, answer), level + 1, at))
        return float(np.inf)

    def _push_block(self, frontier: list[Node], at: int, survey: Survey, done: int) -> None:
        """What is left of a survey."""
        if at == len(self._surveys):
            self._surveys.append((survey, done))
        self._surveys[at] = survey, done
        if done < len(survey.rows):
            heapq.heappush(frontier, (float(survey.bound_s[done]), BLOCK, at))

    def _home(self, row: int, *, is_group: bool) -> Home:
        """Who knows these kernels, and shares the same layers out over context ranks."""
        one = self.lattice.keep(np.array([row]))
        kernels = tuple(int(one[name][0]) for name in KERNELS)
        return (kernels,) if is_group else (kernels, int(one["context_strategy"][0]))

    def _weigh(self, level: int) -> float:
        return _WEIGHTS[level]
