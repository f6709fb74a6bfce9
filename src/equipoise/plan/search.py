"""Search the space of choices: bounds first, prices for what no bound rules out, best first.

Why
    The first good answer comes within a second, and what is left to gain is known at any time:
    the least bound of all that was not priced. A search that is stopped is an answer with a gap.

What it decides
    Choices wait in one queue by the least that they can take: first by ``plan.bound``, over all
    rows; then by kernels that they share, where many are found too large (``plan.room``), then as a
    family, by ``plan.family``; then, of several context ranks, with their own messages; last by
    ``sim.step``. ``plan.climb`` finds a good one to begin with, ``plan.dive`` a better one. What
    comes out of the queue and cannot
    be ``gap`` faster than the best is never looked at again, nor is anything behind it.

    With documents, a choice is priced on the pipeline that has most work of one packed step; the
    best four then on the four that have most.

Kept true (tests/unit/plan/test_search.py, by Hypothesis)
    On small spaces the answer is within ``gap`` of pricing every row; the same seed gives the same
    answer; a stopped search that is resumed ends as one that was not; more memory is never slower.

Sources
    Best-first branch and bound: Lawler and Wood, Operations Research 14(4), 1966. Measured prices
    in place of formulas, penalties for what does not fit: the Frontier study, arXiv:2312.12705.
"""

import dataclasses
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from equipoise.base.errors import LayoutError, SpecError
from equipoise.cost.step import StepPrice
from equipoise.plan.alike import group_alike
from equipoise.plan.bound import Floats, least_seconds, needed_bytes
from equipoise.plan.choice import Choice
from equipoise.plan.climb import climb
from equipoise.plan.cores import Cores
from equipoise.plan.dive import Item, dive
from equipoise.plan.family import Kernels, Passes, own_passes
from equipoise.plan.fullest import Travels
from equipoise.plan.kernels import bound_by_kernels
from equipoise.plan.least import least_step_s
from equipoise.plan.outcome import Outcome, Priced, Progress
from equipoise.plan.packs import Packer, Packs
from equipoise.plan.room import fullest_bytes
from equipoise.plan.space import COLUMNS, Ints, Space
from equipoise.plan.tally import Tally
from equipoise.schedule.compiled import compile_loop
from equipoise.schedule.pipeline_sweep import fill, sweep
from equipoise.sim.kernel_key import kernel_key
from equipoise.sim.machine import Machine
from equipoise.sim.parts import StepParts
from equipoise.sim.step import Documents, price_step
from equipoise.spec.model import ModelSpec

_HINTS = 6
"""Choices that are best with full windows, priced first with documents."""

_HINT_SHARE = 0.5
"""Of the time, for full windows."""

_DIVES = 24
"""Families that are priced as soon as all are bounded by their kernels."""

_WORTH_COMPILING = 50_000
"""Choices of which so many are replayed that the compiler is loaded for them."""


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
    _windows: dict[int, float] = field(default_factory=dict)
    _parts: dict[tuple[object, ...], StepParts] = field(default_factory=dict)
    _read: dict[tuple[object, ...], Passes] = field(default_factory=dict)
    _travels: Travels = field(default_factory=dict)
    _packs: Packs = field(init=False)
    _least: Kernels = field(init=False)
    cores: Cores = field(init=False)

    def __post_init__(self) -> None:
        self._packs = Packs(self.model, self.packer)
        self._least = Kernels(self.model, self.machine)
        self.cores = Cores(self.model, self.machine, self._packs)

    def run(
        self, *, seconds: float = np.inf, watch: Callable[[Progress], None] | None = None
    ) -> Outcome:
        """Search until nothing can be ``gap`` faster, or the time is over.

        Args:
            seconds: The most to take; what is found by then is the answer.
            watch: Told how far the search is after each price.
        """
        begin = time.monotonic()
        self.too_large.clear()
        if len(self.space) >= _WORTH_COMPILING:
            for loop in (sweep, fill):
                compile_loop(loop)
        until = begin + seconds
        hints_until = begin + seconds * (1.0 if self.packer is None else _HINT_SHARE)
        needs = needed_bytes(self.model, self.machine, self.space)
        capacity = self.machine.capacity_bytes
        rows = np.flatnonzero(needs <= capacity)
        peak = least_seconds(
            self.model, self.machine, self.space, has_documents=self.packer is not None
        )[rows]
        lowest = float(peak.min(initial=np.inf))

        tally = Tally(self.known, self._price, capacity, watch, self.beats_s)
        climb(
            self.space,
            rows,
            needs[rows] / capacity,
            peak,
            lambda row: tally.price(row, lowest) if self.packer is None else self._window_s(row),
            lambda: time.monotonic() > hints_until,
        )
        for row in sorted(self._windows, key=lambda row: (self._windows[row], row))[:_HINTS]:
            if np.isfinite(self._windows[row]) and (time.monotonic() < until or not tally.fitting):
                tally.price(row, lowest)
        queue, kernels = self._kernels(rows, peak)
        members: list[Ints] = []
        bounded, passed, has_dived = 0, np.inf, False
        while queue:
            bound, stage, at = queue[0]
            if bound >= tally.best_s * (1 - self.gap) or time.monotonic() > until:
                break
            if stage > 0 and not has_dived:  # all groups are opened
                limit = tally.best_s * (1 - self.gap)
                bounded += dive(queue, members, self.space, self._family_s, limit, until)
                for least, _, at in sorted(each for each in queue if each[1] == 2)[:_DIVES]:
                    if least < tally.best_s * (1 - self.gap) and time.monotonic() < until:
                        tally.price(int(members[at][0]), queue[0][0])
                has_dived = True
                continue
            heapq.heappop(queue)
            if stage == 0:
                families, others = self._families(kernels[at], bound, tally.best_s * (1 - self.gap))
                passed = min(passed, others)
                for tighter, family in families:
                    heapq.heappush(queue, (tighter, 1, len(members)))
                    members.append(family)
            elif stage == 1:
                bounded += 1
                heapq.heappush(queue, (max(bound, self._family_s(int(members[at][0]))), 2, at))
            elif stage == 2:
                for row in members[at].tolist():
                    heapq.heappush(queue, (max(bound, self._split_s(row)), 3, row))
            elif stage == 3:
                heapq.heappush(queue, (max(bound, self._own_s(at)), 4, at))
            else:
                tally.price(at, bound)
        return tally.outcome(
            min(queue[0][0] if queue else np.inf, passed),
            listed=len(self.space),
            ruled_out=len(self.space) - len(rows) + sum(map(len, self.too_large)),
            bounded=bounded,
            least_bytes=float(needs.min()),
        )

    def _kernels(self, rows: Ints, peak: Floats) -> tuple[list[Item], list[Ints]]:
        """A queue of rows that run the same kernels, by the least bound of each group."""
        names = ["tp", "cp", "micro_batch", "ep", "etp"]
        names += ["dp"] if self.packer is not None else []
        groups = group_alike([self.space[name][rows] for name in names])
        queue = [(float(peak[group].min()), 0, at) for at, group in enumerate(groups)]
        heapq.heapify(queue)
        return queue, [rows[group] for group in groups]

    def _families(
        self, rows: Ints, bound: float, limit: float
    ) -> tuple[list[tuple[float, Ints]], float]:
        """Rows of one group by family, and what each takes at least by the group's kernels.

        Those that take ``limit`` or more are left out; second the least of them.
        """
        space, packs = self.space, self.packer is not None
        choice = space.choice(int(rows[0]))
        passes = self._least.group_passes(choice, self._packs.bins(choice))
        of_rows = self.model, self.machine, space, rows, passes, self._travels
        least = np.maximum(bound_by_kernels(*of_rows, has_documents=packs), bound)
        near = least < limit
        others = float(least[~near].min(initial=np.inf))
        rows, least = rows[near], least[near]
        tokens, heavier = self._packs.tokens(choice), passes.is_last_heavier
        needs = fullest_bytes(self.model, space, rows, tokens=tokens, is_last_heavier=heavier)
        fits = needs <= self.machine.capacity_bytes
        self.too_large.append(rows[~fits])
        rows, least = rows[fits], least[fits]
        groups = group_alike([space[name][rows] for name in COLUMNS if name != "context_strategy"])
        return [(float(least[group[0]]), rows[group]) for group in groups], others

    def documents(self, choice: Choice) -> Documents:
        """Micro-batches of every data-parallel rank, those with most work first."""
        return self._packs.documents(choice)

    def parts(self, choice: Choice, *, in_windows: bool = False) -> StepParts:
        """What runs the same kernels over the same links shares what was priced.

        Args:
            choice: Layout and options.
            in_windows: Whether of full windows, whatever documents there are.
        """
        layout, options = choice.layout, choice.options
        of_core, core = self.cores.find(choice, in_windows=in_windows)
        key = *of_core, *kernel_key(layout, options)
        if key not in self._parts:
            kinds = self._least.kinds(layout)
            self._parts[key] = StepParts(
                self.model, self.machine, layout, options, core=core, kinds=kinds
            )
        return self._parts[key]

    def _passes(self, choice: Choice, *, own: bool) -> Passes:
        layout, options = choice.layout, choice.options
        alike = dataclasses.replace(options, context_strategy="") if not own else options
        key = own, kernel_key(layout, alike), layout.dp, options.micro_batch
        if key not in self._read:
            if own:
                batches = self.documents(choice)[0]
                self._read[key] = own_passes(self.parts(choice), batches, self._least.splits)
            else:
                parts = self.parts(choice) if layout.cp == 1 else None
                bins = self._packs.bins(choice)
                self._read[key] = self._least.family_passes(choice, bins, own=parts)
        return self._read[key]

    def _family_s(self, row: int) -> float:
        choice = self.space.choice(row)
        passes = self._passes(choice, own=False)
        return self._least_s(choice, passes)

    def _least_s(self, choice: Choice, passes: Passes) -> float:
        micro_batches = len(self.documents(choice)[0])
        return least_step_s(self.model, self.machine, choice, passes, micro_batches)

    def _split_s(self, row: int) -> float:
        """Of several context ranks, with layers on the stages where they will be."""
        if self.space["cp"][row] == 1 or row in self.known:
            return 0.0
        choice = self.space.choice(row)
        try:
            parts = self.parts(choice)
        except (LayoutError, SpecError):  # heads, or ranks of a node, that do not divide
            return float(np.inf)
        median = parts.price(self._packs.bins(choice).typical.astype(np.float64))
        passes = self._passes(choice, own=False)
        passes = dataclasses.replace(passes, typical=median, splits=self._least.splits)
        return self._least_s(choice, passes)

    def _own_s(self, row: int) -> float:
        """Of several context ranks, with what travels between them."""
        is_alone = self.space["cp"][row] == 1 and self.packer is None
        if is_alone or row in self.known:
            return 0.0
        choice = self.space.choice(row)
        try:
            passes = self._passes(choice, own=True)
        except (LayoutError, SpecError):  # heads, or ranks of a node, that do not divide
            return float(np.inf)
        return self._least_s(choice, passes)

    def _window_s(self, row: int) -> float:
        """With full windows, which are soon priced; infinite if it does not fit."""
        if row not in self._windows:
            choice = self.space.choice(row)
            layout, options = choice.layout, choice.options
            try:
                parts = self.parts(choice, in_windows=True)
                price = price_step(self.model, self.machine, layout, options, parts=parts)
                self._windows[row] = price.step_s if price.fits else np.inf
            except (LayoutError, SpecError):
                self._windows[row] = np.inf
        return self._windows[row]

    def _price(self, row: int) -> Priced | None:
        if row in self.known:
            return self.known[row]
        try:
            price = self._step(self.space.choice(row))
        except (LayoutError, SpecError):  # a schedule that this many micro-batches do not fill
            return None
        priced = Priced(row, price.step_s, price.needs_bytes)
        self.known[row] = priced
        if self.note is not None:
            self.note(priced)
        return priced

    def _step(self, choice: Choice) -> StepPrice:
        return price_step(
            self.model,
            self.machine,
            choice.layout,
            choice.options,
            documents=self.documents(choice)[:1],
            parts=self.parts(choice),
        )
