"""What one run of a search has priced, and the best of it.

Kept true (tests/unit/plan/search/test_search.py, tests/unit/plan/search/test_classes.py)
    The best fits, and is the least of what was priced.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from equipoise.plan.search.outcome import Outcome, Priced, Progress


@dataclass(slots=True)
class Tally:
    """Prices choices for a search, and keeps count."""

    known: dict[int, Priced]
    """Everything that was ever priced; ``replay`` adds to it."""
    replay: Callable[[int], Priced | None]
    """The price of a row; None where it cannot be laid out."""
    capacity_bytes: float
    watch: Callable[[Progress], None] | None
    best_s: float = np.inf
    fitting: set[int] = field(default_factory=set)

    def price(self, row: int, bound_s: float) -> float:
        """Step time of a row, infinite if it does not fit; nothing takes less than the bound."""
        priced = self.replay(row)
        found = float(np.inf)
        if priced is not None and priced.memory_bytes <= self.capacity_bytes:
            self.fitting.add(row)
            found = priced.step_s
            self.best_s = min(self.best_s, found)
        if self.watch is not None:
            self.watch(Progress(len(self.known), self.best_s, min(bound_s, self.best_s)))
        return found

    def fitting_s(self, row: int) -> float:
        """Step time of a row that was priced, infinite if it does not fit or was not."""
        return self.known[row].step_s if row in self.fitting else float(np.inf)

    def outcome(
        self, left_s: float, *, listed: int, ruled_out: int, bounded: int, least_bytes: float
    ) -> Outcome:
        """What was found.

        Args:
            left_s: The least bound of what was not priced.
            listed: Choices in the space.
            ruled_out: Of these, by memory.
            bounded: Families whose kernels were priced.
            least_bytes: The least that any choice needs by bound, if none was priced.
        """
        ranked = sorted((self.known[row] for row in self.fitting), key=lambda x: (x.step_s, x.row))
        tried = [each.memory_bytes for each in self.known.values()]
        return Outcome(
            tuple(ranked),
            Progress(len(self.known), self.best_s, min(left_s, self.best_s)),
            listed,
            ruled_out,
            bounded,
            min(tried, default=least_bytes),
        )
