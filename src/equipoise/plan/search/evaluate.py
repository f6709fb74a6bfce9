"""Evaluating nodes of the search tree: tighter and tighter lower bounds, and at last the price.

Why
    A bound of a million choices takes a second, a replay of one takes twenty milliseconds. In
    between are relaxations that many choices share.

What it decides
    Which evaluations there are, and what they share::

        branch     a group of choices that run the same kernels: the bound of each, and which do
                   not fit
        family_s   choices that differ in their context strategy alone
        split_s    with several context ranks: layers on the stages where they will be
        own_s      and with their own messages
        price      the step, replayed

    No bound exceeds the next. What one evaluation read the others use. Attention cores are priced
    once for all choices that share them: of the same documents, tensor ranks, context ranks and
    strategy. The micro-batch that layers are split for is priced first, as ``sim.step`` does: of
    many distinct micro-batches only the first few are replayed, so prices do not depend on the
    order of the search.

Kept true (tests/unit/plan/search/test_search.py, tests/unit/plan/search/test_evaluate.py)
    Bounds never exceed prices; evaluations do not depend on what was evaluated before.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import FitError, LayoutError, SpecError
from equipoise.cost.step.request import kernel_key
from equipoise.plan.bounds.group import Travels, group_bound_s
from equipoise.plan.bounds.kernels import Kernels, Passes, divided_passes, own_passes
from equipoise.plan.bounds.memory import stage_bound_bytes
from equipoise.plan.bounds.pipeline import LESS, pipeline_bound_s, rounding_s
from equipoise.plan.search.incumbent import Priced
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import COLUMNS, Space, group_equal
from equipoise.plan.space.lattice import Lattice
from equipoise.plan.space.packs import Packer, Packs, pack_key
from equipoise.sim.attention import AttentionCore, Splits
from equipoise.sim.divided import DividedStep
from equipoise.sim.machine import Machine
from equipoise.sim.parts import StepParts
from equipoise.sim.settle.sharding import auto_price
from equipoise.sim.step import price_step, typical, uniform_documents
from equipoise.spec.catalog import POLICIES
from equipoise.spec.model.presets import ModelSpec

_NOT_LAID_OUT = (FitError, LayoutError, SpecError)
"""Raised by impossible choices: heads that do not divide, documents that nothing holds."""


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """Branches of a group."""

    families: list[tuple[float, Ints]]
    """Lower bound [s] and rows of each family."""
    pruned_s: float
    """The least bound of the rows that were pruned as too slow."""
    too_large: Ints
    """Rows that do not fit."""


class Estimates:
    """Bounds and prices of the choices of one space."""

    def __init__(
        self,
        model: ModelSpec,
        machine: Machine,
        space: Space | Lattice,
        packer: Packer | None,
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
        """One evaluation: its name, then its arguments."""
        name, *subject = question
        return getattr(self, name)(*subject)

    def branch(self, rows: Ints, bound: float, cutoff: float) -> Branches:
        """Families of one group, bounded by the group's kernels.

        Args:
            rows: Choices that run the same kernels, int64 [n].
            bound: Their lower bound so far [s].
            cutoff: From this bound on, rows are pruned [s].
        """
        space, packs = cast(Space, self._space), self.packs  # groups are of listed spaces
        choice = space.choice(int(rows[0]))
        try:
            passes = self.kernels.group_passes(choice, packs.bins(choice))
        except FitError:  # a document that no ranks hold
            return Branches([], np.inf, rows)
        if POLICIES[choice.options.policy].runs_together:
            # Ranks wait for each other, so none computes longer than the step.
            busy = LESS * (passes.busy_s - rounding_s(int(passes.counts.sum()), 1))
            least = np.full(len(rows), busy / (1.0 - space.base.residuals.step_share))
        else:
            of_rows = self._model, self._machine, space, rows, passes, self._travels
            least = group_bound_s(*of_rows, has_documents=packs.has_documents)
        least = np.maximum(least, bound)
        near = least < cutoff
        others = float(least[~near].min(initial=np.inf))
        rows, least = rows[near], least[near]
        tokens, heavier = packs.tokens(choice), passes.is_last_heavier
        needs = stage_bound_bytes(self._model, space, rows, tokens=tokens, is_last_heavier=heavier)
        fits = needs <= self._machine.capacity_bytes
        too_large, rows, least = rows[~fits], rows[fits], least[fits]
        groups = group_equal([space[name][rows] for name in COLUMNS if name != "context_strategy"])
        families = [(float(least[group[0]]), rows[group]) for group in groups]
        return Branches(families, others, too_large)

    def family_s(self, row: int) -> float:
        """Bound of the choices that differ from this one in their context strategy alone [s]."""
        choice = self._space.choice(row)
        if POLICIES[choice.options.policy].runs_together:
            return 0.0  # passes hide only as much as the ranks that they wait for
        return self._bound_s(choice, self._passes(choice, own=False))

    def split_s(self, row: int) -> float:
        """Bound with several context ranks and layers on the stages where they will be [s]."""
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
        return self._bound_s(choice, passes)

    def own_s(self, row: int) -> float:
        """Bound with what travels between context ranks [s]."""
        if self._space["cp"][row] == 1 and not self.packs.has_documents:
            return 0.0
        choice = self._space.choice(row)
        try:
            passes = self._passes(choice, own=True)
        except _NOT_LAID_OUT:
            return float(np.inf)
        return self._bound_s(choice, passes)

    def window_s(self, row: int) -> float:
        """Price with full windows, which are quickly replayed; infinite if it does not fit [s]."""
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
        """Parts of a choice; those that run the same kernels over the same links share prices.

        Args:
            choice: Layout and options.
            in_windows: Whether micro-batches are full windows, whatever documents there are.
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

    def _bound_s(self, choice: Choice, passes: Passes) -> float:
        documents = self.packs.heaviest(choice)
        if isinstance(documents, DividedStep):
            micro_batches = int(passes.counts.sum())
        else:
            micro_batches = len(documents[0])
        return pipeline_bound_s(self._model, self._machine, choice, passes, micro_batches)


class Cores:
    """Attention cores, each priced once."""

    def __init__(self, model: ModelSpec, machine: Machine, packs: Packs) -> None:
        self._model, self._machine, self._packs = model, machine, packs
        self._known: dict[tuple[object, ...], AttentionCore] = {}
        self._splits: dict[int, Splits] = {}

    def find(self, choice: Choice, *, in_windows: bool) -> tuple[tuple[object, ...], AttentionCore]:
        """The core of a choice, and the key that choices of the same core share.

        Args:
            choice: Layout and options.
            in_windows: Whether micro-batches are full windows, whatever documents there are.
        """
        layout, options = choice.layout, choice.options
        shared = (tuple(layout.group_of(0, "cp")), options.context_strategy)
        alone = in_windows or not self._packs.has_documents
        key = (
            *(options.micro_batch, () if alone else (layout.dp, options.policy)),
            *(layout.tp, shared if layout.cp > 1 else ()),
        )
        if key not in self._known:
            machine = self._machine.at(options.precision)
            links = machine.context_links(layout)
            splits = self._splits.setdefault(layout.cp, {})
            price = auto_price(self._model, machine, layout, options)
            core = AttentionCore(
                self._model, layout, options, machine, links, splits=splits, price=price
            )
            rows = uniform_documents(layout, options) if alone else self._packs.heaviest(choice)
            if not isinstance(rows, DividedStep):
                core.price(typical(rows))
            self._known[key] = core
        return key, self._known[key]
