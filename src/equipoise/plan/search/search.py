"""Branch and bound over the space of choices, best first, with an answer at any time.

Why
    The first good answer comes within a second, and the gap is known at any time: the incumbent
    over the least lower bound of all that is not yet priced. A stopped search is an answer with a
    gap.

What it decides
    Choices are nodes of a tree: the whole space branches into *groups* that run the same kernels, a
    group into *families* that differ in their context strategy alone, a family into its rows. Nodes
    wait in one frontier by their lower bound: first the roofline's (``plan.bounds.roofline``), then
    the tighter and tighter ones of ``plan.search.evaluate``, and a row's last evaluation is its
    price. A node whose bound is not ``gap`` below the incumbent is pruned, and with it everything
    behind it in the frontier. ``plan.search.heuristics`` finds the first incumbent.

    The first few nodes are evaluated together, by all cores (``plan.search.team``). Which ones does
    not depend on how many cores there are, so neither does the answer.

    With documents, a choice is priced on the pipeline that has most work of one packed step; the
    best four then on the four that have most.

    Where time is limited, the seeds of the warm start are priced before anything else. They are set
    aside, so a search that ends by itself ends as it would without them, and are among the answers
    of one that is stopped, even in the middle of an evaluation (``plan.search.deadline``).

Kept true (tests/unit/plan/search/test_search.py, by Hypothesis)
    On small spaces the answer is within ``gap`` of pricing every row; the same seed gives the same
    answer; a stopped search that is resumed ends as one that was not; more memory is never slower;
    no evaluation begins after the deadline; no seed is faster than a stopped search's answer.

Sources
    Best-first branch and bound: Lawler and Wood, Operations Research 14(4), 1966. Measured prices
    in place of formulas, penalties for what does not fit: the Frontier study, arXiv:2312.12705.
"""

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.plan.bounds.roofline import needed_bytes, peak_bound_s
from equipoise.plan.search.deadline import Clock, Deadline, TimeOver
from equipoise.plan.search.evaluate import Branches, Estimates
from equipoise.plan.search.heuristics import climb, find_seeds
from equipoise.plan.search.incumbent import (
    Incumbent,
    Node,
    Outcome,
    Priced,
    Reached,
    SearchProgress,
)
from equipoise.plan.search.team import Home, Team, spare_cores
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import Space, group_equal
from equipoise.plan.space.lattice import Lattice
from equipoise.plan.space.packs import Packer
from equipoise.schedule.compiled import compile_loop
from equipoise.schedule.pipeline.sweep import fill, sweep
from equipoise.sim.divided import DividedStep, require_whole
from equipoise.sim.machine import Machine
from equipoise.sim.parts import StepParts
from equipoise.sim.step import Documents, StepRun, run_step
from equipoise.spec.model.presets import ModelSpec

_HINTS = 6
"""With documents, choices that are best with full windows and are priced first."""

_HINT_SHARE = 0.5
"""Share of the time for full windows."""

_SEED_SHARE = 0.5
"""Share of the time for the warm start."""

KERNELS = ("tp", "cp", "micro_batch", "ep", "etp")
"""Columns that say which kernels run."""

_ANSWERS = 4
"""A plan shows the best and three runners-up, so nothing is pruned before that many fit, ..."""
_TRIES = 24
"""... or that many were priced."""

_LARGE = 50_000
"""From this many choices on, the compiler is loaded for their replays, and cores are shared."""

GROUP, FAMILY, ROW, SPLIT, OWN = range(5)
"""How tightly a node is bounded: a group by the roofline; a family as part of its group; a row as
part of its family, with layers on their stages, then with its own messages."""

_EVALUATIONS = {GROUP: "branch", FAMILY: "family_s", ROW: "split_s", SPLIT: "own_s", OWN: "price"}
"""The next evaluation of a node."""

_WEIGHTS = {GROUP: 8, FAMILY: 1, ROW: 1, SPLIT: 4, OWN: 64}
"""How long that takes, roughly."""

_AT_ONCE = 512
"""Weight of the nodes that are evaluated together, before the frontier is looked at again."""


@dataclass(slots=True)
class Search:
    """One search; ``run`` may be called again after it was stopped."""

    model: ModelSpec
    machine: Machine
    space: Space | Lattice
    packer: Packer | None = None
    gap: float = 0.01
    known: dict[int, Priced] = field(default_factory=dict)
    """Priced before."""
    note: Callable[[Priced], None] | None = None
    """Receives each choice that is priced."""
    beats_s: float = np.inf
    """An incumbent from elsewhere: what is not ``gap`` below it is pruned."""
    too_large: list[Ints] = field(default_factory=list)
    """Rows that do not fit, which the roofline's memory bound did not prune."""
    clock: Clock = time.monotonic
    estimates: Estimates = field(init=False)
    _members: list[Ints] = field(default_factory=list)
    """Rows of each group, then of each family."""
    _was_stopped: bool = False
    """In an evaluation, whose caches may be half filled."""

    def __post_init__(self) -> None:
        self.estimates = self._make_estimates()

    @property
    def listed(self) -> Space:
        """The space, where it is listed; a lattice has a search of its own."""
        return cast(Space, self.space)

    def _make_estimates(self) -> Estimates:
        return Estimates(self.model, self.machine, self.space, self.packer)

    def run(
        self, *, seconds: float = np.inf, watch: Callable[[SearchProgress], None] | None = None
    ) -> Outcome:
        """Search until nothing can be ``gap`` faster, or the time is over.

        Args:
            seconds: The most to take; the incumbent by then is the answer.
            watch: Receives the progress after each price.
        """
        due = Deadline.after(seconds, self.clock)
        if self._was_stopped:
            self._forget()
        self.too_large.clear()
        best = Incumbent(self.known, self._price, self.machine.capacity_bytes, watch, self.beats_s)
        seeds: list[Priced] = []
        if np.isfinite(seconds):
            part = due.part(_SEED_SHARE)
            self._try(part, lambda: self._price_seeds(seeds, part))
        reached = Reached()
        self._try(due, lambda: self._run(best, reached, due))
        if not reached.is_done:
            for priced in seeds:
                if priced.row not in self.known:
                    self._remember(priced)
                best.price(priced.row, reached.bound_s)
        return best.outcome(reached, len(self.space))

    def cutoff_s(self, incumbent_s: float) -> float:
        """Nodes of this bound or more are pruned; infinite where ``gap`` is below 0."""
        return incumbent_s / (1.0 + self.gap) if self.gap >= 0 else np.inf

    def _prunes_from_s(self, best: Incumbent) -> float:
        has_answers = len(best.fitting) >= _ANSWERS or len(self.known) >= _TRIES
        return self.cutoff_s(best.best_s) if has_answers or self.beats_s < np.inf else np.inf

    def _run(self, best: Incumbent, reached: Reached, due: Deadline) -> None:
        """Search; what was reached is written down on the way."""
        is_large = len(self.space) >= _LARGE
        if is_large:
            for loop in (sweep, fill):
                compile_loop(loop)
        of_all, packs = (self.model, self.machine, self.listed), self.packer is not None
        needs = needed_bytes(*of_all, has_documents=packs)
        capacity = self.machine.capacity_bytes
        rows = np.flatnonzero(needs <= capacity)
        reached.rows, reached.least_bytes = len(rows), float(needs.min())
        about = needed_bytes(*of_all)[rows] if packs else needs[rows]
        peak = peak_bound_s(*of_all, has_documents=packs)[rows]
        reached.bound_s = float(peak.min(initial=np.inf))
        frontier = self._branch_root(rows, peak)
        with Team(self.estimates.answer, spare_cores() if is_large else 0) as team:
            self._climb(best, team, rows, about / capacity, peak, due)
            self._best_first(frontier, best, team, reached, due)
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
        self.estimates = self._make_estimates()
        self._was_stopped = False

    def _price_seeds(self, priced: list[Priced], due: Deadline) -> None:
        """The first choice of each recipe that fits, as far as there is time.

        With documents, of those few recipes that are best with full windows.
        """
        packs = self.packer is not None
        recipes = find_seeds(self.model, self.machine, self.listed, has_documents=packs)
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

    def _climb(
        self, best: Incumbent, team: Team, rows: Ints, memory: Floats, peak: Floats, due: Deadline
    ) -> None:
        """Find the first incumbent: with documents, by full windows, which are soon priced."""
        lowest = float(peak.min(initial=np.inf))
        windows: dict[int, float] = {}
        climb_due = due if self.packer is None else due.part(_HINT_SHARE)

        def price(some: list[int]) -> list[float]:
            self._evaluate(team, best, [(lowest, OWN, row) for row in some])
            return [best.fitting_s(row) for row in some]

        def price_windows(some: list[int]) -> list[float]:
            homes = [tuple(int(self.space[name][row]) for name in KERNELS) for row in some]
            asked = [("window_s", row) for row in some]
            seconds = team.ask(asked, [(home,) for home in homes], [1.0] * len(some))
            windows.update(zip(some, seconds, strict=True))
            return seconds

        ask = price if self.packer is None else price_windows
        climb(self.listed, rows, memory, peak, ask, climb_due.is_over)
        hints = [row for row in windows if np.isfinite(windows[row])]
        hints = sorted(hints, key=lambda row: (windows[row], row))[:_HINTS]
        self._evaluate(team, best, [(lowest, OWN, row) for row in hints])

    def _branch_root(self, rows: Ints, peak: Floats) -> list[Node]:
        """The first frontier: groups of rows that run the same kernels, by their least bound."""
        names = (*KERNELS, *(["dp", "policy"] if self.packer is not None else []))
        columns = [self.listed[name][rows] for name in names]
        if self.packer is not None:  # where ranks meet in each turn, other documents are packed
            columns.append((self.listed["zero"][rows] >= 2).astype(np.int64))
        groups = group_equal(columns)
        self._members = [rows[group] for group in groups]
        frontier = [(float(peak[group].min()), GROUP, at) for at, group in enumerate(groups)]
        heapq.heapify(frontier)
        return frontier

    def _best_first(
        self, frontier: list[Node], best: Incumbent, team: Team, reached: Reached, due: Deadline
    ) -> None:
        """Evaluate the nodes of the least bounds, until nothing can be ``gap`` faster."""
        pruned_s = np.inf
        while frontier:
            cutoff = self._prunes_from_s(best)
            reached.bound_s = min(frontier[0][0], pruned_s)
            reached.level, reached.open_nodes, reached.asked = frontier[0][1], frontier, []
            if frontier[0][0] >= cutoff:
                break
            if due.is_over():
                return
            nodes, weight = list[Node](), 0.0
            while frontier and frontier[0][0] < cutoff and weight < _AT_ONCE:
                nodes.append(heapq.heappop(frontier))
                weight += self._weigh(nodes[-1][1])
            reached.asked = nodes
            reached.bounded += sum(level == FAMILY for _, level, _ in nodes)
            for node, answer in zip(nodes, self._evaluate(team, best, nodes), strict=True):
                pruned_s = min(pruned_s, self._branch(frontier, node, answer, reached))
        reached.bound_s = min(frontier[0][0] if frontier else np.inf, pruned_s)
        reached.is_done = True

    def _evaluate(self, team: Team, best: Incumbent, nodes: Sequence[Node]) -> list[Any]:
        """The next evaluation of each node; prices are compared with the incumbent."""
        cutoff = self._prunes_from_s(best)
        answers: list[Any] = [0.0] * len(nodes)
        asked, homes, weights, places = [], [], [], []
        for place, (bound, level, at) in enumerate(nodes):
            if level >= ROW and at in self.known:
                continue
            question, row = self._question((bound, level, at), cutoff)
            asked.append(question)
            homes.append(self._home(row, is_group=level <= GROUP))
            weights.append(self._weigh(level))
            places.append(place)
        for place, answer in zip(places, team.ask(asked, homes, weights), strict=True):
            answers[place] = answer
            if isinstance(answer, Priced):
                self._remember(answer)
        for bound, level, at in nodes:
            if level == OWN and at in self.known:
                best.price(at, bound)
        return answers

    def _question(self, node: Node, cutoff: float) -> tuple[tuple[Any, ...], int]:
        """What to ask about a node, and a row of it."""
        bound, level, at = node
        row = at if level >= ROW else int(self._members[at][0])
        subject = (self._members[at], bound, cutoff) if level == GROUP else (row,)
        return (_EVALUATIONS[level], *subject), row

    def _weigh(self, level: int) -> float:
        return _WEIGHTS[level]

    def _home(self, row: int, *, is_group: bool) -> Home:
        """Who packs the same documents; and shares the same layers out over context ranks."""
        packed, shared = (
            tuple(int(self.space[name][row]) for name in names)
            for names in (("dp", "micro_batch", "policy"), ("tp", "cp", "context_strategy"))
        )
        return (packed,) if is_group else (packed, shared)

    def _branch(self, frontier: list[Node], node: Node, answer: Any, _reached: Reached) -> float:
        """Push the branches of an evaluated node; returns the least bound of those pruned."""
        bound, level, at = node
        if isinstance(answer, Branches):
            self.too_large.append(answer.too_large)
            for tighter, family in answer.families:
                heapq.heappush(frontier, (tighter, FAMILY, len(self._members)))
                self._members.append(family)
            return answer.pruned_s
        if level < OWN:
            rows = self._members[at].tolist() if level == FAMILY else [at]
            for row in rows:
                heapq.heappush(frontier, (max(bound, answer), level + 1, row))
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
