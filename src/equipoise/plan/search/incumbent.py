"""The incumbent: the best choice so far; and what a search reports, on its way and at its end.

Kept true (tests/unit/plan/search/test_search.py, tests/unit/plan/search/test_mixed.py)
    The incumbent fits, and no priced choice that fits is faster.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Node = tuple[float, int, int]
"""Lower bound [s], how tightly it is bounded (levels of ``plan.search.search``), and a place: among
the search's members up to ``FAMILY``, else a row of its space. Of equal bounds the less tight one
comes first."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A choice that was priced."""

    row: int
    step_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """How far a search has come."""

    priced: int
    best_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """The incumbent over the lower bound, minus 1; infinite without either."""
        if self.bound_s <= 0.0 or self.best_s == np.inf:
            return float(np.inf)
        return max(0.0, self.best_s / self.bound_s - 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The answer of a search."""

    fitting: tuple[Priced, ...]
    """Choices that fit, fastest first."""
    progress: SearchProgress
    listed: int
    """Choices in the space."""
    ruled_out: int
    """Choices pruned by memory before anything was priced."""
    bounded: int
    """Families whose kernels were priced."""
    least_bytes: float
    """What the smallest choice needs, by its bound or its price."""
    loosest: tuple[int, int] | None = None
    """As of ``Reached``, if the search was stopped."""


@dataclass(slots=True)
class Reached:
    """How far a run of a search has come, whenever it is stopped."""

    bound_s: float = 0.0
    """Every node of a lower bound was evaluated."""
    rows: int | None = None
    """Choices that memory does not prune; None before that is known."""
    least_bytes: float = np.inf
    """The least memory bound of any choice."""
    bounded: int = 0
    is_done: bool = False
    level: int | None = None
    """How tightly the open node of the least bound is bounded."""
    open_nodes: list[Node] = field(default_factory=list)
    asked: list[Node] = field(default_factory=list)
    """Nodes that are being evaluated."""

    @property
    def loosest(self) -> tuple[int, int] | None:
        """How tightly the open node of the least bound is bounded, and how many are as loose."""
        if self.is_done or self.level is None:
            return None
        count = sum(level <= self.level for _, level, _ in (*self.open_nodes, *self.asked))
        return self.level, count


@dataclass(slots=True)
class Incumbent:
    """Prices choices for a search, and keeps the best that fits."""

    known: dict[int, Priced]
    """Every choice that was ever priced; ``replay`` adds to it."""
    replay: Callable[[int], Priced | None]
    """The price of a row; None where it cannot be laid out."""
    capacity_bytes: float
    watch: Callable[[SearchProgress], None] | None
    best_s: float = np.inf
    fitting: set[int] = field(default_factory=set)

    def price(self, row: int, bound_s: float) -> float:
        """Step time of a row, infinite if it does not fit; no open node has a bound below."""
        priced = self.replay(row)
        if priced is not None and priced.memory_bytes <= self.capacity_bytes:
            self.fitting.add(row)
            self.best_s = min(self.best_s, priced.step_s)
        if self.watch is not None:
            self.watch(SearchProgress(len(self.known), self.best_s, min(bound_s, self.best_s)))
        return self.fitting_s(row)

    def fitting_s(self, row: int) -> float:
        """Step time of a row that was priced, infinite if it does not fit or was not."""
        return self.known[row].step_s if row in self.fitting else float(np.inf)

    def outcome(self, reached: Reached, listed: int) -> Outcome:
        """The answer of a search over ``listed`` choices."""
        ranked = sorted((self.known[row] for row in self.fitting), key=lambda x: (x.step_s, x.row))
        tried = [each.memory_bytes for each in self.known.values()]
        return Outcome(
            tuple(ranked),
            SearchProgress(len(self.known), self.best_s, min(reached.bound_s, self.best_s)),
            listed,
            0 if reached.rows is None else listed - reached.rows,
            reached.bounded,
            min(tried, default=reached.least_bytes),
            reached.loosest,
        )
