"""What a search learns of a choice, look by look, each closer and dearer than the one before.

Why
    A bound of a million choices takes a second, a replay of one takes twenty milliseconds. In
    between are looks that many choices share.

What it decides
    Which looks there are, and what they share::

        open_group   choices that run the same kernels: one bound of each, and who is too large
        family_s     choices that differ in their context strategy alone
        split_s      of several context ranks, with layers on the stages where they will be
        own_s        and with their own messages
        price        the step, replayed

    No look exceeds the next. What one look read the others use.

Kept true (tests/unit/plan/search/test_search.py, tests/unit/plan/bounds/test_choices.py)
    Bounds never exceed prices; looks do not depend on what was looked at before.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import FitError, LayoutError, SpecError
from equipoise.plan.bounds.family import Kernels, Passes, divided_passes, own_passes
from equipoise.plan.bounds.fullest import Travels
from equipoise.plan.bounds.kernels import bound_by_kernels
from equipoise.plan.bounds.memory import fullest_bytes
from equipoise.plan.bounds.step import LESS, least_step_s, rounding_s
from equipoise.plan.search.cores import Cores
from equipoise.plan.search.outcome import Priced
from equipoise.plan.search.packs import Packer, Packs, pack_key
from equipoise.plan.space.alike import group_alike
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import COLUMNS, Space
from equipoise.sim.divided import DividedStep
from equipoise.sim.machine import Machine
from equipoise.sim.parts import StepParts, kernel_key
from equipoise.sim.step import price_step
from equipoise.spec.catalog import POLICIES
from equipoise.spec.model.presets import ModelSpec

_NOT_LAID_OUT = (FitError, LayoutError, SpecError)
"""What a choice raises that cannot be: heads that do not divide, documents that nothing holds."""


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A group that was looked at."""

    families: list[tuple[float, Ints]]
    """Rows of each family, and what they take at least [s]."""
    others_s: float
    """What those take at least that were left out, as too slow."""
    too_large: Ints
    """Rows that do not fit."""


class Estimates:
    """Looks at the choices of one space."""

    def __init__(
        self, model: ModelSpec, machine: Machine, space: Space, packer: Packer | None
    ) -> None:
        self._model, self._machine, self._space = model, machine, space
        self.packs = Packs(model, packer)
        self.kernels = Kernels(model, machine)
        self.cores = Cores(model, machine, self.packs)
        self._windows: dict[int, float] = {}
        self._parts: dict[tuple[object, ...], StepParts] = {}
        self._read: dict[tuple[object, ...], Passes] = {}
        self._travels: Travels = {}

    def answer(self, question: tuple[Any, ...]) -> Any:
        """One look: its name, then what it takes."""
        looks: dict[str, Callable[..., Any]] = {
            "open_group": self.open_group,
            "family_s": self.family_s,
            "split_s": self.split_s,
            "own_s": self.own_s,
            "price": self.price,
            "window_s": self.window_s,
        }
        name, *subject = question
        return looks[name](*subject)

    def open_group(self, rows: Ints, bound: float, limit: float) -> Opened:
        """Rows of one group by family, and what each takes at least by the group's kernels.

        Args:
            rows: That run the same kernels, int64 [n].
            bound: What they take at least [s].
            limit: What takes as long is left out [s].
        """
        space, packs = self._space, self.packs
        choice = space.choice(int(rows[0]))
        try:
            passes = self.kernels.group_passes(choice, packs.bins(choice))
        except FitError:  # a document that no ranks hold
            return Opened([], np.inf, rows)
        of_rows = self._model, self._machine, space, rows, passes, self._travels
        if POLICIES[choice.options.policy].runs_together:
            least = self._least_together(rows, passes)
        else:
            least = bound_by_kernels(*of_rows, has_documents=packs.has_documents)
        least = np.maximum(least, bound)
        near = least < limit
        others = float(least[~near].min(initial=np.inf))
        rows, least = rows[near], least[near]
        tokens, heavier = packs.tokens(choice), passes.is_last_heavier
        needs = fullest_bytes(self._model, space, rows, tokens=tokens, is_last_heavier=heavier)
        fits = needs <= self._machine.capacity_bytes
        too_large, rows, least = rows[~fits], rows[fits], least[fits]
        groups = group_alike([space[name][rows] for name in COLUMNS if name != "context_strategy"])
        families = [(float(least[group[0]]), rows[group]) for group in groups]
        return Opened(families, others, too_large)

    def _least_together(self, rows: Ints, passes: Passes) -> Floats:
        """Where ranks wait for each other, none computes longer than the step, float64 [rows]."""
        least = LESS * (passes.busy_s - rounding_s(int(passes.counts.sum()), 1))
        return np.full(len(rows), least / (1.0 - self._space.base.residuals.step_share))

    def family_s(self, row: int) -> float:
        """Of choices that differ from this one in their context strategy alone."""
        choice = self._space.choice(row)
        # What hides is known of the ranks that are waited for.
        if POLICIES[choice.options.policy].runs_together:
            return 0.0
        return self._least_s(choice, self._passes(choice, own=False))

    def split_s(self, row: int) -> float:
        """Of several context ranks, with layers on the stages where they will be."""
        if self._space["cp"][row] == 1:
            return 0.0
        choice = self._space.choice(row)
        try:
            parts = self.parts(choice)
        except _NOT_LAID_OUT:  # heads, or ranks of a node, that do not divide
            return float(np.inf)
        median = parts.price(self.packs.bins(choice).typical.astype(np.float64))
        passes = self._passes(choice, own=False)
        passes = dataclasses.replace(passes, typical=median, splits=self.kernels.splits)
        return self._least_s(choice, passes)

    def own_s(self, row: int) -> float:
        """Of several context ranks, with what travels between them."""
        if self._space["cp"][row] == 1 and not self.packs.has_documents:
            return 0.0
        choice = self._space.choice(row)
        try:
            passes = self._passes(choice, own=True)
        except _NOT_LAID_OUT:
            return float(np.inf)
        return self._least_s(choice, passes)

    def window_s(self, row: int) -> float:
        """With full windows, which are soon priced; infinite if it does not fit."""
        if row not in self._windows:
            choice = self._space.choice(row)
            layout, options = choice.layout, choice.options
            try:
                parts = self.parts(choice, in_windows=True)
                price = price_step(self._model, self._machine, layout, options, parts=parts)
                self._windows[row] = price.step_s if price.fits else np.inf
            except (LayoutError, SpecError):
                self._windows[row] = np.inf
        return self._windows[row]

    def price(self, row: int) -> Priced | None:
        """The step, replayed; None where it cannot be laid out.

        With documents, on the pipeline that has most work.
        """
        choice = self._space.choice(row)
        layout, options = choice.layout, choice.options
        try:
            documents, parts = self.packs.heaviest(choice), self.parts(choice)
            price = price_step(
                self._model, self._machine, layout, options, documents=documents, parts=parts
            )
        except _NOT_LAID_OUT:  # as by a schedule that this many micro-batches do not fill
            return None
        return Priced(row, price.step_s, price.needs_bytes)

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
            kinds = self.kernels.kinds(layout)
            self._parts[key] = StepParts(
                self._model, self._machine, layout, options, core=core, kinds=kinds
            )
        return self._parts[key]

    def _passes(self, choice: Choice, *, own: bool) -> Passes:
        layout, options = choice.layout, choice.options
        alike = dataclasses.replace(options, context_strategy="") if not own else options
        key = own, kernel_key(layout, alike), pack_key(choice)
        if key not in self._read:
            if own:
                documents, parts = self.packs.heaviest(choice), self.parts(choice)
                self._read[key] = (
                    divided_passes(parts, documents, layout, self.kernels.splits)
                    if isinstance(documents, DividedStep)
                    else own_passes(parts, documents[0], self.kernels.splits)
                )
            else:
                is_own = layout.cp == 1 and not POLICIES[options.policy].divides
                own_parts = self.parts(choice) if is_own else None
                bins = self.packs.bins(choice)
                self._read[key] = self.kernels.family_passes(choice, bins, own=own_parts)
        return self._read[key]

    def _least_s(self, choice: Choice, passes: Passes) -> float:
        documents = self.packs.heaviest(choice)
        if isinstance(documents, DividedStep):
            micro_batches = int(passes.counts.sum())
        else:
            micro_batches = len(documents[0])
        return least_step_s(self._model, self._machine, choice, passes, micro_batches)
