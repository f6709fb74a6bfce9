"""A space too large to list: cells, and the factors that each is crossed with.

Why
    DeepSeek-V3 on 2,048 devices can be laid out in 17 million ways. As columns they take 2.5 GB and
    nine seconds before the first is looked at. But a choice is a place in a product: degrees that
    multiply to the devices, times settings that depend on few of them. So choices are numbered, and
    a number is taken apart when its choice is wanted.

What it decides
    A *cell* is one set of degrees and a micro-batch. A *factor* is a list of values of a few
    columns for each *kind* of cell; a cell's choices are the product of its lists, the last factor
    running fastest. Numbers do not depend on what was looked at before.

Kept true (tests/unit/plan/space/test_lattice.py, by Hypothesis)
    Choices are those of ``list_space``, by the same numbers; what is restricted or looked for is
    what a mask over all of them keeps.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from equipoise.base.arrays import Flags, Ints
from equipoise.cost.step.request import StepOptions
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import COLUMNS, Space

Places = Mapping[str, Sequence[int]]
"""Numbers that some columns may have, by ``COLUMNS``."""


@dataclass(frozen=True, slots=True, eq=False)
class ValueLists:
    """Values of some columns, a list for each kind of cell."""

    kind: Ints
    """Kind of each cell, int64 [cells]."""
    first: Ints
    """Where each kind's list begins, int64 [kinds]."""
    size: Ints
    """Length of each kind's list, int64 [kinds]."""
    values: dict[str, Ints]
    """All lists, one after the other, int64 [values] each; what tells kinds apart among them."""
    names: tuple[str, ...]
    """Columns that the factor gives."""
    place: Ints
    """Place of each value in its list before any was dropped, int64 [values]."""

    @classmethod
    def of_lists(
        cls, kind: Ints, code: Ints, values: dict[str, Ints], names: Sequence[str]
    ) -> "ValueLists":
        """From the values of all kinds, and the kind of each value, ascending.

        Args:
            kind: Kind of each cell, int64 [cells].
            code: Kind of each value, int64 [values].
            values: Columns, int64 [values] each.
            names: Those that the factor gives.
        """
        kinds = int(kind.max(initial=-1)) + 1
        size = np.bincount(code, minlength=kinds).astype(np.int64)
        first = np.cumsum(size) - size
        return cls(kind, first, size, values, tuple(names), np.arange(len(code)) - first[code])

    @property
    def sizes(self) -> Ints:
        """Length of each cell's list, int64 [cells]."""
        return self.size[self.kind]

    def keep(self, kept: Flags) -> "ValueLists":
        """Some of the values."""
        code = np.repeat(np.arange(len(self.size)), self.size)[kept]
        values = {name: column[kept] for name, column in self.values.items()}
        size = np.bincount(code, minlength=len(self.size)).astype(np.int64)
        first = np.cumsum(size) - size
        return ValueLists(self.kind, first, size, values, self.names, self.place[kept])

    def prefer(self, kept: Flags) -> "ValueLists":
        """Some of the values, and all of a kind that would have none."""
        code = np.repeat(np.arange(len(self.size)), self.size)
        some = np.bincount(code[kept], minlength=len(self.size)) > 0
        return self.keep(kept | ~some[code])

    def at(self, cells: Ints, index: Ints) -> Ints:
        """Where the values of some cells stand, by their place in the list, int64 [n]."""
        return np.asarray(self.first[self.kind[cells]] + index)


class LatticeColumn:
    """One column of a lattice, for some rows at a time."""

    def __init__(self, lattice: "Lattice", name: str) -> None:
        self._lattice, self._name = lattice, name

    def __getitem__(self, rows: int | Ints) -> Ints:
        """Numbers of these rows; a number for one row."""
        column = self._lattice.keep(np.atleast_1d(np.asarray(rows, dtype=np.int64)))[self._name]
        return column if np.ndim(rows) else column[0]


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """Choices by number, without a list of them."""

    cells: dict[str, Ints]
    """Degrees and micro-batch, int64 [cells] each."""
    factors: tuple[ValueLists, ...]
    """The last runs fastest."""
    base: StepOptions
    offload: int = 0
    firsts: Ints = field(init=False)
    """Number of each cell's first choice, and of all, int64 [cells + 1]."""

    def __post_init__(self) -> None:
        counts = np.ones(len(self.cells["tp"]), dtype=np.int64)
        for factor in self.factors:
            counts = counts * factor.sizes
        object.__setattr__(self, "firsts", np.concatenate(([0], np.cumsum(counts))))

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def __getitem__(self, name: str) -> LatticeColumn:
        return LatticeColumn(self, name)

    @property
    def counts(self) -> Ints:
        """Choices of each cell, int64 [cells]."""
        return np.diff(self.firsts)

    def keep(self, rows: Ints) -> Space:
        """Some choices as columns.

        Args:
            rows: Their numbers, int64 [n].

        Cost: about 0.3 us a choice.
        """
        cell = np.searchsorted(self.firsts, rows, side="right") - 1
        columns = {name: values[cell] for name, values in self.cells.items()}
        left = rows - self.firsts[cell]
        for factor in reversed(self.factors):
            sizes = factor.size[factor.kind[cell]]
            places = factor.at(cell, left % sizes)
            left = left // sizes
            columns |= {name: factor.values[name][places] for name in factor.names}
        columns["offload"] = np.full(len(rows), self.offload)
        ordered = {name: columns[name] for name in (*COLUMNS, "micro_batches")}
        return Space(ordered, self.base)

    def choice(self, row: int) -> Choice:
        """One choice; from ``len`` on, offloading what the quotient says."""
        offload, row = divmod(row, len(self))
        one = self.keep(np.array([row]))
        return one.choice(offload)

    def rows_of(self, cells: Ints, *, step: Ints | None = None) -> Ints:
        """Numbers of all choices of some cells, or of every ``step``-th, int64 [n]."""
        counts = self.counts[cells] if step is None else self.counts[cells] // step
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        place = np.arange(total) - np.repeat(ends - counts, counts)
        if step is not None:
            place = place * np.repeat(step, counts)
        return np.asarray(np.repeat(self.firsts[cells], counts) + place)

    def restrict(self, allowed: Places, where: Mapping[str, str] | None = None) -> "Lattice":
        """A lattice of the choices that have such numbers; its choices are numbered anew.

        Args:
            allowed: Numbers of columns.
            where: The column that has to be above 1 for another to be read at all.
        """
        factors = list(self.factors)
        for name, places in allowed.items():
            for at, factor in enumerate(factors):
                if name in factor.names:
                    kept = np.isin(factor.values[name], list(places))
                    if where is not None and name in where:
                        kept |= factor.values[where[name]] <= 1
                    factors[at] = factor.keep(kept)
        return self._of(factors)

    def _of(self, factors: Sequence[ValueLists]) -> "Lattice":
        """Without what was dropped, and the cells that have no choice left."""
        counts = np.ones(len(self.cells["tp"]), dtype=np.int64)
        for factor in factors:
            counts = counts * factor.sizes
        alive = counts > 0
        fresh = []
        for factor in factors:
            code = np.repeat(np.arange(len(factor.size)), factor.size)
            place = np.arange(len(code)) - factor.first[code]
            fresh.append(dataclasses.replace(factor, kind=factor.kind[alive], place=place))
        cells = {name: values[alive] for name, values in self.cells.items()}
        return Lattice(cells, tuple(fresh), self.base, self.offload)

    def find(self, allowed: Places, *, strictly: bool = False) -> Ints:
        """Numbers of the choices that have such numbers in some columns, int64 [n].

        Args:
            allowed: Numbers of columns.
            strictly: Otherwise a column in which nothing is left of a cell is as it is.

        Cost: about 0.1 us a number.
        """
        some: Flags = np.ones(len(self.cells["tp"]), dtype=bool)
        for name in allowed.keys() & self.cells.keys():
            kept = some & np.isin(self.cells[name], list(allowed[name]))
            some = kept if strictly or kept.any() else some
        cells = np.flatnonzero(some)
        factors = []
        for factor in self.factors:
            for name in factor.names:
                if name in allowed:
                    kept = np.isin(factor.values[name], list(allowed[name]))
                    factor = factor.keep(kept) if strictly else factor.prefer(kept)
            factors.append(factor)
        counts = np.ones(len(cells), dtype=np.int64)
        for factor in factors:
            counts = counts * factor.sizes[cells]
        ends = np.cumsum(counts)
        left = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
        of_cell, rows, stride = np.repeat(cells, counts), np.zeros(len(left), np.int64), 1
        strides: Ints | int = stride
        for factor, whole in zip(reversed(factors), reversed(self.factors), strict=True):
            sizes = factor.size[factor.kind[of_cell]]
            rows += factor.place[factor.at(of_cell, left % sizes)] * strides
            left = left // sizes
            strides = strides * whole.sizes[of_cell]
        return np.asarray(self.firsts[of_cell] + rows)
