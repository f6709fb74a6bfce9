"""Search on a cluster of several classes of nodes: every choice on the sites where it stands.

Why
    Priced on the slowest class, a layout whose stages stay inside their classes looks as slow as
    one that reduces gradients across the slow network between them. What such a price prunes may
    be the best there is.

What it decides
    Choices are priced by ``sim.layered_step.run_sites`` and wait by a bound of their own. Whatever
    the split, layers stand on pipeline ranks, and rank r with n of them takes at least::

        busy_r(n) + max(gathered - first forward, 0) + max(reduced - last backward, 0) + optimizer

    each on the rank's own site, of the lightest n layers. A step takes at least the smallest time
    within which all ranks together hold all layers. First that is asked of choices that share
    kernels and links, without recomputation; then with the recomputation and the context strategy
    of each; and what is first in the queue is priced, likely ones before others of one bound.

Kept true (tests/unit/plan/test_classes.py)
    The answer is that of pricing every row; the bound never exceeds ``run_sites``; no degrees or
    order that are fixed by hand are faster.

Sources
    Stages by class of network card and by speed: Holmes, arXiv:2312.03549.
"""

import dataclasses
import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from equipoise.base.errors import LayoutError, SpecError
from equipoise.cost.step import Floats, StepPrice
from equipoise.plan.alike import group_alike
from equipoise.plan.bins import Batches
from equipoise.plan.bound import least_bytes, least_seconds
from equipoise.plan.choice import Choice
from equipoise.plan.climb import climb
from equipoise.plan.fullest import least_travel
from equipoise.plan.least import LESS, rounding_s
from equipoise.plan.outcome import Outcome, Progress
from equipoise.plan.search import Search
from equipoise.plan.space import SCHEDULES, Ints
from equipoise.sim.layered_step import run_sites
from equipoise.sim.machine import Machine
from equipoise.sim.parts import BatchParts
from equipoise.sim.sites import SiteParts
from equipoise.spec.run import Recompute

_SHARED = ("tp", "cp", "pp", "dp", "order", "micro_batch", "ep", "etp", "zero", "replicas")
"""What says who computes and who shares weights."""

_OWN = ("recompute", "context_strategy")

_CLIMB_SHARE = 0.3
"""Of the time, for a good choice to begin with."""

_Item = tuple[float, int, float, int]
"""Bound, stage, guess, place."""


@dataclass(slots=True)
class ClassSearch(Search):
    """A search whose prices and bounds are those of every stage's own devices and links."""

    _sites: SiteParts | None = None
    _travel: dict[tuple[object, ...], Floats] = field(default_factory=dict)

    def run(
        self, *, seconds: float = np.inf, watch: Callable[[Progress], None] | None = None
    ) -> Outcome:
        """Search until nothing can be ``gap`` faster, or the time is over.

        Args:
            seconds: The most to take; what is found by then is the answer.
            watch: Told how far the search is after each price.
        """
        begin = time.monotonic()
        needs, capacity = least_bytes(self.model, self.space), self.machine.capacity_bytes
        rows = np.flatnonzero(needs <= capacity)
        least, guess = self._peak_s(rows)
        lowest, best = float(least.min(initial=np.inf)), np.inf
        fitting: set[int] = set()

        def is_over(share: float = 1.0) -> bool:
            return time.monotonic() > begin + seconds * share

        def price(row: int, bound: float) -> float:
            nonlocal best
            priced = self._price(row)
            fits = priced is not None and priced.memory_bytes <= capacity
            if priced is not None and fits:
                fitting.add(row)
                best = min(best, priced.step_s)
            if watch is not None:
                watch(Progress(len(self.known), best, min(bound, best)))
            return priced.step_s if priced is not None and fits else np.inf

        climb(
            self.space,
            rows,
            needs[rows] / capacity,
            guess,
            lambda row: price(row, lowest),
            lambda: is_over(_CLIMB_SHARE),
        )
        groups = group_alike([self.space[name][rows] for name in _SHARED])
        members: list[Ints] = [rows[group] for group in groups]
        queue: list[_Item] = [
            (float(least[group].min()), 0, 0.0, at) for at, group in enumerate(groups)
        ]
        heapq.heapify(queue)
        bounded = 0
        while queue and queue[0][0] < best * (1 - self.gap) and not is_over():
            bound, stage, _, at = heapq.heappop(queue)
            if stage == 3:
                price(at, bound)
                continue
            mine = members[at]
            if stage == 0:
                bounded += 1
                tighter = max(bound, self._group_s(mine, recompute="none"))
                heapq.heappush(queue, (tighter, 1, 0.0, at))
            elif stage == 1:
                for group in group_alike([self.space[name][mine] for name in _OWN]):
                    tighter = max(bound, self._group_s(mine[group]))
                    heapq.heappush(queue, (tighter, 2, 0.0, len(members)))
                    members.append(mine[group])
            else:
                for row, waits in zip(mine.tolist(), self._waits(mine).tolist(), strict=True):
                    heapq.heappush(queue, (bound, 3, waits, row))
        left = min(queue[0][0] if queue else best, best)
        ranked = sorted((self.known[row] for row in fitting), key=lambda one: (one.step_s, one.row))
        tried = [each.memory_bytes for each in self.known.values()]
        return Outcome(
            tuple(ranked),
            Progress(len(self.known), best, left),
            len(self.space),
            len(self.space) - len(rows),
            bounded,
            min(tried, default=float(needs.min())),
        )

    def _step(self, choice: Choice) -> StepPrice:
        rows = self.documents(choice)[:1]
        layout, options = choice.layout, choice.options
        return run_sites(
            self.model, self.machine, layout, options, documents=rows, prices=self.prices
        ).price

    @property
    def prices(self) -> SiteParts:
        """What was priced of all sites."""
        if self._sites is None:
            self._sites = SiteParts(self.model, self.machine)
        return self._sites

    def least_s(self, choice: Choice, *, virtual: int) -> float:
        """Time that a step takes at least, each stage on its site.

        Args:
            choice: Layout and options.
            virtual: The most stages of a rank, whose instructions are rounded.

        Raises:
            LayoutError: heads, or ranks of a node, do not divide.
        """
        layout, options = choice.layout, choice.options
        batches = self.documents(choice)[0]
        sites = self.prices.sites(layout)
        distinct = {id(site): site for site in sites}
        counts = [sum(site is one for site in sites) for one in distinct.values()]
        times = [self._rank_s(choice, site, batches) for site in distinct.values()]
        span = least_worst(times, counts, self.model.layers)
        span -= rounding_s(len(batches) * virtual, layout.pp)
        return LESS * span / (1.0 - options.residuals.step_share)

    def _group_s(self, rows: Ints, *, recompute: Recompute | None = None) -> float:
        """Of choices that differ in what they compute again and exchange, and in schedule."""
        virtual = int(self.space["virtual"][rows].max())
        found = float(np.inf)
        for at in np.unique(self.space["context_strategy"][rows], return_index=True)[1]:
            choice = self.space.choice(int(rows[at]))
            if recompute is not None:
                options = dataclasses.replace(choice.options, recompute=recompute)
                choice = Choice(choice.layout, options)
            try:
                found = min(found, self.least_s(choice, virtual=virtual))
            except (LayoutError, SpecError):  # heads, or ranks of a node, that do not divide
                continue
        return found

    def _rank_s(self, choice: Choice, site: Machine, batches: Batches) -> Floats:
        """What a rank of a site takes with so many layers, at least, float64 [layers + 1] [s]."""
        layout, options = choice.layout, choice.options
        parts = self.prices.parts(site, layout, options)
        priced = [parts.price(np.asarray(batch)) for batch in batches]
        times = {id(each): each for each in priced}
        busy = sum(
            sum(one is each for one in priced) * _passes(each).sum(axis=1)
            for each in times.values()
        )
        found = _lightest(np.asarray(busy))
        gather, reduce, optimizer = self._travel_s(choice, site).T
        if options.stack.data_overlap:
            gather = np.maximum(gather - _most(priced[0], slice(0, 1)), 0.0)
            reduce = np.maximum(reduce - _most(priced[-1], slice(1, 3)), 0.0)
        found = found + gather + reduce + optimizer
        return np.minimum.accumulate(found[::-1])[::-1]

    def _travel_s(self, choice: Choice, site: Machine) -> Floats:
        """Of so many layers: gathered, reduced, updated, float64 [layers + 1, 3] [s]."""
        key = id(site), choice.layout
        if key not in self._travel:
            each = (
                least_travel(self.model, site, choice, layers)
                for layers in range(1, self.model.layers + 1)
            )
            self._travel[key] = np.array([(0.0, 0.0, 0.0), *each])
        return self._travel[key]

    def _peak_s(self, rows: Ints) -> tuple[Floats, Floats]:
        """What rows take at all devices' peak at least, and about, float64 [rows] [s]."""
        precision, machine, space = self.space.base.precision, self.machine, self.space.keep(rows)
        ratio = machine.peak_flop_per_s(precision) / machine.mean_peak_flop_per_s(precision)
        faster = np.where(space["pp"] > 1, ratio, 1.0)
        least, about = (
            faster * least_seconds(self.model, machine, space, has_documents=is_short)
            for is_short in (True, self.packer is not None)
        )
        return least, about

    def _waits(self, rows: Ints) -> Floats:
        """Which of rows that compute alike are priced first: those whose pipelines wait least."""
        schedule, virtual = self.space["schedule"][rows], self.space["virtual"][rows]
        waits = 1.0 / virtual
        found: Floats = np.where(schedule > SCHEDULES.index("interleaved"), 0.6 * waits, waits)
        return found


def least_worst(times: Sequence[Floats], counts: Sequence[int], layers: int) -> float:
    """The least time within which ranks of several kinds hold so many layers together.

    Args:
        times: Of each kind, what a rank with 0, 1, .. layers takes; never less of more, from 0.
        counts: Ranks of each kind.
        layers: To be held.

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


def _passes(parts: BatchParts) -> Floats:
    """Seconds of every layer's passes, float64 [layers, 3]."""
    kinds = {id(layer): layer.sum(axis=1) for layer in parts.layers}
    return np.array([kinds[id(layer)] for layer in parts.layers])


def _lightest(seconds: Floats) -> Floats:
    """Of the n lightest layers together, float64 [layers + 1]."""
    return np.concatenate(([0.0], np.cumsum(np.sort(seconds))))


def _most(parts: BatchParts, passes: slice) -> Floats:
    """Of the n heaviest layers and both ends, float64 [layers + 1] [s]."""
    heaviest = np.sort(_passes(parts)[:, passes].sum(axis=1))[::-1]
    ends = float(parts.first[passes].sum() + parts.last[passes].sum())
    return ends + np.concatenate(([0.0], np.cumsum(heaviest)))
