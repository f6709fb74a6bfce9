"""Into how many parts rows are cut at a site, and where parts begin.

What it decides
    Every rank's rows are cut into equally many parts, as even as whole rows are. Where a run leaves
    the number open, ``cost.overlap`` chooses it for each number of rows, by prices that all ranks
    have from the run's file: all choose alike, and again when the run resumes.

Kept true (tests/multi/parallel/test_overlap.py)
    Parts of a count sum to it, and differ by one row at most.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.cost.overlap import parts_on
from equipoise.spec.run.resolved import PartMachine

Parts = int | PartMachine
"""In how many parts rows travel, or by what to choose."""


@dataclass(slots=True, eq=False)
class PartedSites:
    """The parts of one kind of site, and how often it ran with how many."""

    parts: Parts
    ran: Counter[int] = field(default_factory=Counter)
    """Forward passes with rows by their number of parts, since this was last taken."""

    def choose(
        self, *, flop: float, moved_bytes: float, most: int | None = None, ways: int = 2
    ) -> int:
        """Parts of the next forward pass, which is counted.

        Args:
            flop: As for ``parts_on``.
            moved_bytes: Likewise.
            most: Rows of the rank with the fewest, where every part needs one of each rank.
            ways: As for ``parts_on``.
        """
        parts = self.parts
        if isinstance(parts, PartMachine):
            parts = parts_on(parts, flop=flop, moved_bytes=moved_bytes, ways=ways)
        if most is not None:
            parts = max(1, min(parts, most))
        if flop:  # ZeRO sums gradients in a pass without rows
            self.ran[parts] += 1
        return parts


def part_rows(rows: Ints, parts: int) -> Ints:
    """Rows of each part of each count, int64 [parts, *rows.shape].

    >>> part_rows(np.array([5, 2]), 3).tolist()
    [[1, 0], [2, 1], [2, 1]]
    """
    ends = rows * np.arange(parts + 1).reshape(-1, *(1 for _ in rows.shape)) // parts
    return np.diff(ends, axis=0)
