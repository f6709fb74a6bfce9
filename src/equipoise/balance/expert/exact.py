"""Copies of hot experts from the counts of this very micro-batch, so that ranks come out even.

Why
    Loads change from step to step; a plan made of earlier ones is late. Counts are known before
    any row travels, and a plan of them takes less time than a layer.

What it decides
    The target: the mean and a tolerance, or what slots allow at best (``lower_bound``). Four
    orders of filling are tried, and the one with the fewest copies is kept. Where none reaches the
    target, the lowest that one does reach is found by halving. A copy is made only for at least
    ``least_rows`` rows; where the excess is less, the target rises above it.

Kept true (tests/unit/balance/expert/test_exact.py, by Hypothesis, and an integer program)
    max/mean and the number of copies against their lower bounds; no copy below ``least_rows``, and
    no rank with more copies than slots; permuting nothing changes nothing: equal requests have
    equal answers.

Sources
    A threshold lowered by halving, each step making replicas with quotas: UltraEP,
    arXiv:2606.04101. Break-even of a replica: ``balance.expert.bound``.
"""

import numpy as np

from equipoise.balance.expert.bound import lower_bound
from equipoise.balance.expert.loops import fill
from equipoise.balance.expert.request import ExpertRequest, with_copies, write_schedule
from equipoise.base.arrays import Ints
from equipoise.schedule.compiled import run_loop
from equipoise.schedule.expert.schedule import ExpertSchedule, add_by

_ORDERS = ((0, 0), (0, 1), (1, 0), (1, 1))
"""Whether copies take all room, and whether the least excess goes first."""

_STEP = 0.004
"""The lowest target is found to this share of the mean."""


def exact(request: ExpertRequest) -> ExpertSchedule:
    """Copies for the loads at hand."""
    loads = request.loads
    kept, copies = plan_copies(request, loads)
    return write_schedule("exact", request, *with_copies(request, kept, copies))


def plan_copies(request: ExpertRequest, loads: Ints) -> tuple[Ints, Ints]:
    """Rows that owners keep, int64 [X], and expert, rank and rows of each copy, int64 [n, 3].

    Args:
        request: For its owners, slots and limits.
        loads: Rows of each expert, int64 [X].

    Cost: 0.3 ms at 256 experts on 64 ranks, compiled.
    """
    heights = add_by(request.owners, loads, request.ranks)
    start = Fill(request, loads, heights, np.zeros(request.ranks, dtype=np.int64))
    target = max(lower_bound(request, loads), start.tolerated)
    return start.lowered(target)


class Fill:
    """Loads from which copies are made."""

    def __init__(self, request: ExpertRequest, kept: Ints, heights: Ints, used: Ints) -> None:
        self.request, self.kept, self.heights, self.used = request, kept, heights, used
        self._owners, self._slots = request.owners, min(request.slots, len(kept))

    @property
    def tolerated(self) -> int:
        """The highest load within the tolerance of the mean, in rows."""
        total = int(self.heights.sum())
        return max(
            -(-total // self.request.ranks),
            int(total * (1 + self.request.allowed) / self.request.ranks),
        )

    def lowered(self, target: int) -> tuple[Ints, Ints]:
        """Rows kept and copies at the target, or the lowest one that can be reached."""
        low, high = target, int(self.heights.max())
        best: tuple[Ints, Ints] = self.kept, np.zeros((0, 3), dtype=np.int64)
        if high <= target or not self._slots:
            return best
        if reached := self._at(target):
            return reached
        step = max(1, int(_STEP * int(self.heights.sum()) / self.request.ranks))
        while high - low > step:
            middle = (low + high) // 2
            if reached := self._at(middle):
                best, high = reached, middle
            else:
                low = middle
        return best

    def _at(self, target: int) -> tuple[Ints, Ints] | None:
        """The fewest copies that lower every rank to the target."""
        best: tuple[Ints, Ints] | None = None
        request = self.request
        for order in _ORDERS:
            sizes = np.array([self._slots, request.least_rows, target, *order], dtype=np.int64)
            kept = self.kept.copy()
            copies = np.zeros(3 * request.ranks * self._slots + 3, dtype=np.int64)
            work = 64 * (len(kept) + 2 * request.ranks) * request.ranks
            heights, used = self.heights.copy(), self.used.copy()
            made = run_loop(fill, work, sizes, self._owners, kept, heights, used, copies)
            if made >= 0 and (best is None or made < len(best[1])):
                best = kept, copies[: 3 * made].reshape(-1, 3)
        return best
