"""A wrap of documents over neighbours: at most one cut between two ranks.

Why
    Dividing every long document among ever more ranks evens them out, but sends each document to
    all of them. Laid end to end and cut where a rank is full, the same documents need at most
    one cut per rank::

        whole     | a          | b   c        | d  |
        wrapped   | a        | a   b    c | c   d  |

What it decides
    1. Documents are assigned whole first, to turns and then to ranks, as evenly as possible.
    2. The ranks of a turn are laid side by side, those with too much next to those with too
       little; each rank's shortest documents lie outermost, so that cuts go through them.
    3. One rank ends and the next begins between two documents, if some such place leaves neither
       rank above ``even`` times the mean; otherwise within one.

Kept true (tests/unit/balance/packing/test_divided_wrap.py, by Hypothesis)
    Each token appears once; the cap holds; a turn has at most ``ranks - 1`` cuts; no rank is over
    ``even`` times the mean, except for rounding to tokens and what a measured curve adds to parts.

Sources
    Wrap-around: McNaughton, "Scheduling with deadlines and loss functions", Management Science
    6(1), 1959.
"""

import itertools

import numpy as np

from equipoise.balance.packing.parts import reach_tokens
from equipoise.balance.partition import partition
from equipoise.base.arrays import Ints
from equipoise.cost.curve import LoadCurve
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces, lengths_of


class Wrap:
    """A step's documents assigned whole, ready to be wrapped over the ranks of each turn.

    Args:
        pieces: Documents of the step.
        ranks: Ranks of each turn.
        turns: Micro-batches of each rank.
        cap: Most tokens of a micro-batch.
        curve: Price of a document.
    """

    def __init__(self, pieces: Pieces, ranks: int, turns: int, cap: int, curve: LoadCurve) -> None:
        self._pieces, self._curve = pieces, curve
        self._ranks, self._cap = ranks, cap
        self._sizes = lengths_of(pieces)
        self._loads = curve.document_ns(self._sizes)
        turn_of = self._share(np.arange(len(pieces)), turns, ranks * cap)
        self._lines = [self._line(np.flatnonzero(turn_of == turn)) for turn in range(turns)]

    def cut(self, policy: str, even: float) -> PackedStep | None:
        """Cut where ranks are full; None if a micro-batch would be over the cap."""
        turns = []
        for line in self._lines:
            batches = self._cut_line(line, even)
            if max(batch.tokens for batch in batches) > self._cap:
                return None
            turns.append(batches)
        return PackedStep(policy, tuple(zip(*turns, strict=True)))

    def _share(self, documents: Ints, bins: int, cap: int) -> Ints:
        loads, sizes = self._loads[documents], self._sizes[documents]
        bin_of = partition(loads, bins, sizes=sizes, capacity=cap)
        if bin_of is None:  # cuts will make room
            bin_of = partition(loads, bins)
        return np.zeros(len(loads), dtype=np.int64) if bin_of is None else bin_of

    def _line(self, documents: Ints) -> Ints:
        """A turn's documents from the first rank to the last."""
        rank_of = self._share(documents, self._ranks, self._cap)
        work = np.bincount(rank_of, self._loads[documents], self._ranks).astype(np.int64)
        order = np.lexsort((documents, self._sizes[documents], rank_of))
        ends = np.searchsorted(rank_of[order], np.arange(self._ranks + 1))
        held = [documents[order[a:b]] for a, b in itertools.pairwise(ends.tolist())]
        line = [documents[:0]]
        for rank in _side_by_side(work):
            line += [held[rank][::2], held[rank][1::2][::-1]]  # shortest at both ends
        return np.concatenate(line)

    def _cut_line(self, line: Ints, even: float) -> list[MicroBatch]:
        pieces, sizes = self._pieces[line], self._sizes[line]
        ends = np.cumsum(self._loads[line])
        edges = _edges(ends, self._ranks, even)
        owner = np.minimum(np.searchsorted(ends, edges, side="right"), max(0, len(line) - 1))
        before = np.concatenate(([0], ends))
        if not len(line):
            return [MicroBatch(pieces, pieces[:, 1]) for _ in range(self._ranks)]
        inside = reach_tokens(sizes[owner], (edges - before[owner]).astype(float), self._curve)
        bounds = [(0, 0), *zip(owner.tolist(), inside.tolist(), strict=True), (len(line), 0)]
        batches = []
        for (first, skipped), (last, taken) in itertools.pairwise(bounds):
            table = np.column_stack((pieces[first : last + 1], pieces[first : last + 1, 1]))
            if last < len(line):
                table[last - first, 2] = table[last - first, 3] + taken
            table[0, 1] += skipped
            table = table[table[:, 1] < table[:, 2]]
            table = table[np.lexsort((table[:, 1], table[:, 0]))]
            batches.append(MicroBatch(table[:, :3].copy(), table[:, 3].copy()))
        return batches


def _side_by_side(work: Ints) -> list[int]:
    """Order bins so that the running excess over the mean stays small.

    >>> _side_by_side(np.array([9, 5, 1, 5]))
    [1, 3, 0, 2]
    """
    left = sorted(range(len(work)), key=lambda rank: (int(work[rank]), rank))
    total, count = int(work.sum()), len(work)
    order: list[int] = []
    over = 0  # excess of the bins placed so far, times the number of bins
    even = [rank for rank in left if int(work[rank]) * count == total]
    light = [rank for rank in left if int(work[rank]) * count < total]
    heavy = [rank for rank in left if int(work[rank]) * count > total]
    order += even
    while light or heavy:
        chosen = heavy.pop() if heavy and (over <= 0 or not light) else light.pop(0)
        over += int(work[chosen]) * count - total
        order.append(chosen)
    return order


def _edges(ends: Ints, ranks: int, even: float) -> Ints:
    """Where each rank but the last ends on the line of work; documents end at ``ends``."""
    total = int(ends[-1]) if len(ends) else 0
    most = max(-(-total // ranks), int(total * even / ranks))
    edges, start = [], 0
    for rank in range(1, ranks):
        ideal = total * rank // ranks
        low, high = max(start, total - (ranks - rank) * most), min(total, start + most)
        at = int(np.searchsorted(ends, ideal))
        near = [0, *ends[max(0, at - 1) : at + 1].tolist()]
        within = [end for end in near if low <= end <= high]
        start = min(within, key=lambda end: (abs(end - ideal), end), default=-1)
        if start < 0:
            start = min(max(ideal, low), high)
        edges.append(start)
    return np.array(edges, dtype=np.int64)
