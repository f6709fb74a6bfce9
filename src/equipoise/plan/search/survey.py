"""Evaluating nodes of a tree that is never listed: cells by their kernels, then a few rows a time.

Why
    Seventeen million choices take a minute to bound one by one, and most have kernels that alone
    take longer than the incumbent's step. So cells are judged by their kernels before their choices
    are looked at, and choices by what is cheap before what is not.

What it decides
    Evaluations beside those of ``plan.search.evaluate``, from the least tight::

        kernels_s  cells that run the same kernels: all passes, shared out evenly over ranks
        survey     their choices: which may fit, and the bound of mean and bubble of each
        tighten    a few of these: the fullest rank's time, and its memory

    No bound exceeds the next.

Kept true (tests/unit/plan/search/test_vast.py)
    Bounds never exceed prices; what is left out as too large does not fit.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import FitError
from equipoise.plan.bounds.group import group_bound_s
from equipoise.plan.bounds.kernels import Passes
from equipoise.plan.bounds.memory import stage_bound_bytes
from equipoise.plan.bounds.pipeline import LESS, rounding_s
from equipoise.plan.bounds.roofline import needed_bytes
from equipoise.plan.search.evaluate import Estimates
from equipoise.plan.space.columns import Space, group_equal
from equipoise.plan.space.lattice import Lattice
from equipoise.plan.space.packs import Packer
from equipoise.sim.machine import Machine
from equipoise.spec.catalog import POLICIES
from equipoise.spec.model.presets import ModelSpec

_AT_ONCE = 1 << 16
"""Choices that are columns at the same time."""


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """Choices of some cells that may fit and may be fast enough, without their context strategy."""

    bound_s: Floats
    """Lower bound of each, ascending, float64 [n]."""
    rows: Ints
    """The first of those that differ in their context strategy alone, int64 [n]."""
    pruned_s: float
    """The least bound of what was pruned as too slow."""
    too_large: int
    """Choices that do not fit."""
    least_bytes: float
    """What the smallest needs, at least."""


class VastEstimates(Estimates):
    """Bounds and prices of the choices of one lattice."""

    def __init__(
        self, model: ModelSpec, machine: Machine, lattice: Lattice, packer: Packer | None
    ) -> None:
        Estimates.__init__(self, model, machine, lattice, packer)
        self._lattice = lattice

    def kernels_s(self, row: int) -> float:
        """Bound of all choices that run the kernels of this one [s]."""
        one = self._lattice.keep(np.array([row]))
        choice, passes = one.choice(0), self._group_passes(one)
        if passes is None:
            return float(np.inf)
        if POLICIES[choice.options.policy].divides:
            return 0.0
        # Micro-batches over stages are the same number in every cell of these kernels.
        share = choice.options.count_micro_batches(choice.layout) / choice.layout.pp
        even = passes.busy_s / passes.counts.sum() * share
        bound = max(even, passes.once_s) - rounding_s(int(passes.counts.sum()), 1)
        return float(max(0.0, bound) * LESS / (1.0 - self._lattice.base.residuals.step_share))

    def survey(self, cells: Ints, bound: float, cutoff: float) -> Survey:
        """Choices of cells that run the same kernels.

        Args:
            cells: Cells, int64 [n].
            bound: Their lower bound so far [s].
            cutoff: From this bound on, choices are pruned [s].
        """
        lattice, capacity = self._lattice, self._machine.capacity_bytes
        siblings = lattice.factors[-1].sizes[cells]
        counts = lattice.counts[cells] // siblings
        parts, pruned, large, least_bytes = [], np.inf, 0, np.inf
        of_all = self._model, self._machine
        for run in np.split(cells, np.flatnonzero(np.diff(np.cumsum(counts) // _AT_ONCE)) + 1):
            step = lattice.factors[-1].sizes[run]
            rows = lattice.rows_of(run, step=step)
            space = lattice.keep(rows)
            needs = needed_bytes(*of_all, space, has_documents=self.packs.has_documents)
            least_bytes = min(least_bytes, float(needs.min(initial=np.inf)))
            fits = needs <= capacity
            own = np.repeat(step, lattice.counts[run] // step)
            large += int(own[~fits].sum())
            rows, space = rows[fits], space.keep(fits)
            least = np.maximum(self._cheap_bound_s(space), bound)
            near = least < cutoff
            pruned = min(pruned, float(least[~near].min(initial=np.inf)))
            parts.append((least[near], rows[near]))
        least, rows = (np.concatenate(each) for each in zip(*parts, strict=True))
        order = np.argsort(least, kind="stable")
        return Survey(least[order], rows[order], pruned, large, least_bytes)

    def tighten(self, rows: Ints, bound: Floats) -> Floats:
        """Tighter bounds of a few choices of the same kernels; infinite if one does not fit [s]."""
        space, packs = self._lattice.keep(rows), self.packs
        tight = bound.copy()
        for group in self._alike(space):
            some = space.keep(group)
            passes = self._group_passes(some)
            if passes is None:
                tight[group] = np.inf
                continue
            choice, places = some.choice(0), np.arange(len(group))
            if not POLICIES[choice.options.policy].runs_together:
                least = group_bound_s(
                    *(self._model, self._machine, some, places, passes, self._travels),
                    has_documents=packs.has_documents,
                )
                tight[group] = np.maximum(tight[group], least)
            needs = stage_bound_bytes(
                *(self._model, some, places),
                tokens=packs.tokens(choice),
                is_last_heavier=passes.is_last_heavier,
            )
            tight[group[needs > self._machine.capacity_bytes]] = np.inf
        return tight

    def _cheap_bound_s(self, space: Space) -> Floats:
        """Even passes, the bubble of 1F1B and the mean rank, float64 [rows] [s]."""
        bound = np.zeros(len(space))
        for group in self._alike(space):
            some = space.keep(group)
            passes = self._group_passes(some)
            if passes is None:
                bound[group] = np.inf
                continue
            if POLICIES[some.choice(0).options.policy].runs_together:
                busy = LESS * (passes.busy_s - rounding_s(int(passes.counts.sum()), 1))
                bound[group] = busy / (1.0 - space.base.residuals.step_share)
                continue
            places, has_documents = np.arange(len(group)), self.packs.has_documents
            of_all = self._model, self._machine, some, places, passes, None
            bound[group] = group_bound_s(*of_all, has_documents=has_documents)
        return bound

    def _alike(self, space: Space) -> list[Ints]:
        """Places of choices that share kernels and documents."""
        if not len(space):
            return []
        if not self.packs.has_documents:
            return [np.arange(len(space))]
        meets = (space["zero"] >= 2).astype(np.int64)
        return group_equal([space["dp"], space["policy"], meets])

    def _group_passes(self, space: Space) -> Passes | None:
        """Passes of choices that share kernels and documents; None where nothing holds these."""
        choice = space.choice(0)
        layout, options = choice.layout, choice.options
        plain = dataclasses.replace(options, recompute="none", context_strategy="")
        key = (
            *("group", layout.tp, layout.cp, layout.ep, layout.etp, plain.micro_batch),
            *((layout.dp, plain.policy, layout.zero >= 2) if self.packs.has_documents else ()),
        )
        if key not in self._read:
            try:
                self._read[key] = self.kernels.group_passes(choice, self.packs.bins(choice))
            except FitError:  # a document that no ranks hold
                return None
        return self._read[key]
