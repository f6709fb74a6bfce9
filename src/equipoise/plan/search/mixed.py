"""Branch and bound on a cluster of several classes of nodes: every choice on its own sites.

Why
    Priced on the slowest class, a layout whose stages stay inside their classes looks as slow as
    one that reduces gradients across the slow network between them. What such a price prunes may
    be the best there is.

What it decides
    Choices are priced by ``sim.mixed.replay.run_sites`` and wait by a lower bound of their own,
    which relaxes which layers a rank holds (docs/predict/search.md). Rank r with n layers takes at
    least::

        busy_r(n) + max(gathered - first forward, 0) + max(reduced - last backward, 0) + optimizer

    on its own site, with the lightest n layers. First the bound is taken of choices that share
    kernels and links, without recomputation; then with the recomputation and the context strategy
    of each. The first node of the frontier is priced, and of equal bounds the one that a guess
    likes best. The guess knows how long micro-batches are under way, and also says where the local
    search begins.

Kept true (tests/unit/plan/search/test_mixed.py)
    The answer is that of pricing every row; the bound never exceeds ``run_sites``; no degrees or
    order that are fixed by hand are faster. The least worst is that of all ways to share layers.

Sources
    Stages by class of network card and by speed: Holmes, arXiv:2312.03549.
"""

import dataclasses
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import LayoutError, SpecError
from equipoise.plan.bounds.across import across_bound_s
from equipoise.plan.bounds.group import least_travel_s
from equipoise.plan.bounds.pipeline import LESS, rounding_s
from equipoise.plan.bounds.roofline import needed_bytes, peak_bound_s, stages_ahead
from equipoise.plan.search.deadline import Deadline
from equipoise.plan.search.heuristics import climb
from equipoise.plan.search.incumbent import Incumbent, Priced, Reached
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import group_equal, schedules_with
from equipoise.plan.space.packs import Batches
from equipoise.sim.machine import Machine
from equipoise.sim.mixed.replay import run_sites
from equipoise.sim.mixed.sites import SiteParts, slowest_hop_s
from equipoise.sim.parts import BatchParts
from equipoise.sim.step import StepRun
from equipoise.spec.run.spec import Recompute

_SHARED = (
    *("tp", "cp", "pp", "dp", "order", "micro_batch", "ep", "etp", "zero", "replicas", "offload"),
    "policy",
)
"""Columns that say who computes what, and who shares weights."""

_OWN = ("recompute", "context_strategy")

_LOOK_SHARE = 0.4
"""Share of the time for bounds and guesses of groups of choices."""

_CLIMB_SHARE = 0.8
"""Share of the time for the local search."""

_Node = tuple[float, int, float, int]
"""Lower bound, level, guess, place."""


@dataclass(slots=True)
class ClassSearch(Search):
    """A search whose prices and bounds are those of every stage's own devices and links."""

    _sites: SiteParts | None = None
    _travel: dict[tuple[object, ...], Floats] = field(default_factory=dict)

    def _run(self, best: Incumbent, reached: Reached, due: Deadline) -> None:
        """Search until nothing can be ``gap`` faster, or the time is over."""
        # Which stage is fullest is not known: it may stand on the largest device.
        capacity = max(each.device.usable_bytes for each in self.machine.cluster.classes)
        looks_due, climb_due = (due.part(share) for share in (_LOOK_SHARE, _CLIMB_SHARE))
        of_all = self.model, self.machine, self.listed
        needs = needed_bytes(*of_all, has_documents=self.packer is not None)
        rows = np.flatnonzero(needs <= capacity)
        reached.rows, reached.least_bytes = len(rows), float(needs.min())
        least, guess = self._peak_s(rows)
        lowest = reached.bound_s = float(least.min(initial=np.inf))
        groups = group_equal([self.listed[name][rows] for name in _SHARED])
        members: list[Ints] = [rows[group] for group in groups]
        frontier: list[_Node] = []
        for at in sorted(range(len(groups)), key=lambda at: float(guess[groups[at]].min())):
            group, level = groups[at], 0
            bound = float(least[group].min())
            if looks_due.is_over():
                guess[group] = np.inf
            else:
                bound, level = max(bound, self._group_s(members[at], recompute="none")), 1
                guess[group] = self._about_s(members[at], bound, least[group])
                reached.bounded += 1
            frontier.append((bound, level, 0.0, at))
        heapq.heapify(frontier)

        def price(some: list[int]) -> list[float]:
            return [best.price(row, lowest) for row in some]

        climb(self.listed, rows, needs[rows] / capacity, guess, price, climb_due.is_over)
        about = dict(zip(rows.tolist(), guess.tolist(), strict=True))
        while frontier and frontier[0][0] < self.cutoff_s(best.best_s):
            reached.bound_s = frontier[0][0]
            if due.is_over():
                return
            bound, level, _, at = heapq.heappop(frontier)
            if level == 3:
                best.price(at, bound)
                continue
            mine = members[at]
            if level == 0:
                reached.bounded += 1
                tighter = max(bound, self._group_s(mine, recompute="none"))
                heapq.heappush(frontier, (tighter, 1, 0.0, at))
            elif level == 1:
                for group in group_equal([self.listed[name][mine] for name in _OWN]):
                    tighter = max(bound, self._group_s(mine[group]))
                    heapq.heappush(frontier, (tighter, 2, 0.0, len(members)))
                    members.append(mine[group])
            else:
                for row in mine.tolist():
                    heapq.heappush(frontier, (bound, 3, about[row], row))
        reached.bound_s = frontier[0][0] if frontier else np.inf
        reached.is_done = True

    def _forget(self) -> None:
        Search._forget(self)
        self._sites = None
        self._travel.clear()

    def replay(self, choice: Choice) -> StepRun:
        """The step as it was priced: with documents, on the pipeline that has most work."""
        layout, options = choice.layout, choice.options
        rows, prices = self.whole_documents(choice), self.prices
        return run_sites(self.model, self.machine, layout, options, documents=rows, prices=prices)

    def _replay(self, row: int) -> Priced | None:
        try:
            run = self.replay(self.listed.choice(row))
        except (LayoutError, SpecError):  # a schedule that this many micro-batches do not fill
            return None
        return Priced(row, run.price.step_s, run.price.needs_bytes)

    @property
    def prices(self) -> SiteParts:
        """Prices of all sites."""
        if self._sites is None:
            self._sites = SiteParts(self.model, self.machine)
        return self._sites

    def bound_s(self, choice: Choice, *, virtual: int) -> float:
        """Lower bound of a step with each stage on its site [s].

        Args:
            choice: Layout and options.
            virtual: The most stages of a rank, whose instructions are rounded.

        Raises:
            LayoutError: heads, or ranks of a node, do not divide.
        """
        layout, options = choice.layout, choice.options
        batches = self.whole_documents(choice)[0]
        sites = self.prices.sites(layout)
        distinct = {id(site): site for site in sites}
        counts = [sum(site is one for site in sites) for one in distinct.values()]
        times = [self._rank_s(choice, site, batches) for site in distinct.values()]
        span = least_worst(times, counts, self.model.layers)
        span -= rounding_s(len(batches) * virtual, layout.pp)
        return LESS * span / (1.0 - options.residuals.step_share)

    def _group_s(self, rows: Ints, *, recompute: Recompute | None = None) -> float:
        """Bound of choices that differ in recomputation, context strategy and schedule [s]."""
        virtual = int(self.listed["virtual"][rows].max())
        least = float(np.inf)
        for at in np.unique(self.listed["context_strategy"][rows], return_index=True)[1]:
            choice = self.listed.choice(int(rows[at]))
            if recompute is not None:
                options = dataclasses.replace(choice.options, recompute=recompute)
                choice = Choice(choice.layout, options)
            try:
                least = min(least, self.bound_s(choice, virtual=virtual))
            except (LayoutError, SpecError):  # heads, or ranks of a node, that do not divide
                continue
        return least

    def _rank_s(self, choice: Choice, site: Machine, batches: Batches) -> Floats:
        """Least seconds of a site's rank with 0, 1, .. layers, float64 [layers + 1]."""
        layout, options = choice.layout, choice.options
        parts = self.prices.parts(site, layout, options)
        priced = [parts.price(np.asarray(batch)) for batch in batches]
        times = {id(each): each for each in priced}
        busy = sum(
            sum(one is each for one in priced) * layer_passes(each).sum(axis=1)
            for each in times.values()
        )
        seconds = lightest_s(np.asarray(busy))
        gather, reduce, optimizer = self._travel_s(choice, site).T
        if options.stack.data_overlap:
            gather = np.maximum(gather - hiding_s(priced[0], slice(0, 1)), 0.0)
            reduce = np.maximum(reduce - hiding_s(priced[-1], slice(1, 3)), 0.0)
        seconds = seconds + gather + reduce + optimizer
        return np.minimum.accumulate(seconds[::-1])[::-1]

    def _travel_s(self, choice: Choice, site: Machine) -> Floats:
        """Seconds to gather, reduce and update 0, 1, .. layers, float64 [layers + 1, 3]."""
        key = id(site), choice.layout, choice.options.offload
        if key not in self._travel:
            each = (
                least_travel_s(self.model, site, choice, layers)
                for layers in range(1, self.model.layers + 1)
            )
            self._travel[key] = np.array([(0.0, 0.0, 0.0), *each])
        return self._travel[key]

    def _peak_s(self, rows: Ints) -> tuple[Floats, Floats]:
        """Bound of each row, by FLOP and by what crosses sites, and a guess, float64 [rows] [s]."""
        precision, machine, space = (
            self.listed.base.precision,
            self.machine,
            self.listed.keep(rows),
        )
        ratio = machine.peak_flop_per_s(precision) / machine.mean_peak_flop_per_s(precision)
        faster = np.where(space["pp"] > 1, ratio, 1.0)
        least, about = (
            faster * peak_bound_s(self.model, machine, space, has_documents=is_short)
            for is_short in (True, self.packer is not None)
        )
        if self.packer is None:
            across = across_bound_s(self.model, machine, space.columns, space.base)
            least, about = np.maximum(least, across), np.maximum(about, across)
        return least, about

    def _about_s(self, rows: Ints, bound: float, least: Floats) -> Floats:
        """A guess of each row of a group, float64 [rows] [s].

        One micro-batch's way there and back; every other takes its part of the bound, or as long as
        a place among those in flight is taken.
        """
        space, choice = self.listed.keep(rows), self.listed.choice(int(rows[0]))
        again = least / least.min()
        if choice.layout.pp == 1 or not np.isfinite(bound):
            return np.asarray(bound * again)
        layout = choice.layout
        plain = dataclasses.replace(choice.options, recompute="none")
        batches = self.whole_documents(choice)[0]
        first, sites = np.asarray(batches[0]), self.prices.sites(layout)
        parts = [self.prices.parts(site, layout, plain).price(first) for site in sites]
        once = float(np.mean([layer_passes(each).sum() for each in parts]))
        hop_s = slowest_hop_s(self.machine, layout, parts[0], plain.residuals.traffic)
        trip = once * again + 2 * (layout.pp * space["virtual"] - 1) * hop_s
        is_two = np.isin(space["schedule"], schedules_with(lambda each: each.in_v))
        places = np.where(is_two, layout.pp, stages_ahead(space) / space["virtual"])
        count = len(batches)
        each = np.maximum(bound / count * again, trip / np.minimum(places, count))
        return np.asarray(trip + (count - 1) * each)


def least_worst(times: Sequence[Floats], counts: Sequence[int], layers: int) -> float:
    """The least time within which ranks of several kinds together hold all layers.

    Args:
        times: Seconds of a rank of each kind with 0, 1, .. layers; ascending from 0.
        counts: Ranks of each kind.
        layers: Layers to be held.

    >>> import numpy as np
    >>> least_worst([np.arange(7) * 2.0, np.arange(7) * 1.0], [1, 1], 6)
    4.0
    """
    values = np.unique(np.concatenate(times))
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        held = sum(
            count * (int(np.searchsorted(each, values[middle], side="right")) - 1)
            for each, count in zip(times, counts, strict=True)
        )
        low, high = (low, middle) if held >= layers else (middle + 1, high)
    return float(values[low])


def layer_passes(parts: BatchParts) -> Floats:
    """Seconds of every layer's passes, float64 [layers, 3]."""
    kinds = {id(layer): layer.sum(axis=1) for layer in parts.layers}
    return np.array([kinds[id(layer)] for layer in parts.layers])


def lightest_s(seconds: Floats) -> Floats:
    """Seconds of the n lightest layers together, float64 [layers + 1]."""
    return np.concatenate(([0.0], np.cumsum(np.sort(seconds))))


def hiding_s(parts: BatchParts, passes: slice) -> Floats:
    """Seconds of the n heaviest layers and both ends, float64 [layers + 1]."""
    heaviest = np.sort(layer_passes(parts)[:, passes].sum(axis=1))[::-1]
    ends = float(parts.first[passes].sum() + parts.last[passes].sum())
    return ends + np.concatenate(([0.0], np.cumsum(heaviest)))
