"""Schedule a pipeline greedily: each rank takes what is ready, within its memory.

Why
    A fixed order suits equal micro-batches. If stages or micro-batches differ, or documents are
    divided over time, the order that keeps ranks busy depends on the prices.

What it decides
    All ranks are replayed together. A free rank takes a ready input gradient; else a forward, if
    there is room; else a weight gradient, if it ends before the next message.

    Memory cannot deadlock it: each rank reserves room for its whole largest unit. Only the
    oldest unit on a rank may use the reserve, so the oldest unit of all can pass everywhere, and
    then the next one.

Kept true (tests/unit/schedule/pipeline/test_strategies.py, by Hypothesis)
    Schedules for any prices, units, paths and bounds that hold the largest unit pass
    ``check_pipeline``.

Sources
    Greedy filling within a memory limit: arXiv:2401.10241, section 3.1. The reserve is the
    banker's algorithm: E. W. Dijkstra, EWD-108, 1965.
"""

import heapq
from collections import deque
from dataclasses import dataclass

from equipoise.base.arrays import Ints
from equipoise.base.errors import FitError
from equipoise.schedule.pipeline.instruction import Op
from equipoise.schedule.pipeline.prices import PipelinePrices
from equipoise.schedule.pipeline.schedule import Neighbours, Order

F, I, W = int(Op.FORWARD), int(Op.BACKWARD_INPUT), int(Op.BACKWARD_WEIGHT)  # noqa: E741


@dataclass(frozen=True, slots=True)
class Taste:
    """What a rank prefers among sound choices."""

    in_turn: bool
    """Alternate forward and backward where there is room; else run backwards as they arrive."""
    patient: bool
    """Wait rather than begin what would delay the answer to a message in flight."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What to schedule."""

    prices: PipelinePrices
    rank_of: Ints
    paths: Ints
    units: Ints
    most_held: list[int]


class _Rank:
    """The pending work of one rank."""

    __slots__ = (
        "arrivals",
        "backwards",
        "ended",
        "forwards",
        "free_at",
        "held",
        "held_by",
        "last",
        "oldest",
        "order",
        "weights",
    )

    def __init__(self, units: int) -> None:
        self.free_at = 0
        self.arrivals: list[tuple[int, int, int, int]] = []
        """In flight: (time, operation, stage, micro-batch)."""
        self.forwards: list[tuple[int, int, int]] = []
        """Ready: (unit, micro-batch, stage from the last)."""
        self.backwards: list[tuple[int, int, int]] = []
        self.weights: deque[tuple[int, int]] = deque()
        self.held = 0
        self.held_by = [0] * units
        self.ended = [0] * units
        """Remaining input gradients of each unit."""
        self.oldest = 0
        self.last = I
        self.order: Order = []


class Greedy:
    """All ranks, replayed together."""

    def __init__(self, step: Step, taste: Taste) -> None:
        prices = step.prices
        self.taste, self.most_held = taste, step.most_held
        self.takes = prices.of_ops().tolist()
        self.hops, self.sizes = prices.hop_ns.tolist(), prices.activation.tolist()
        self.rank_of: list[int] = step.rank_of.tolist()
        beside = Neighbours.of(step.paths, prices.stages)
        self.before, self.after = beside.before.tolist(), beside.after.tolist()
        self.unit_of = [u for u, (a, b) in enumerate(step.units.tolist()) for _ in range(a, b)]
        self.paths = [[s for s in path if s >= 0] for path in step.paths.tolist()]
        self.ranks = [_Rank(len(step.units)) for _ in step.most_held]
        self.most_unit = self._largest_units(step)
        self.needs: dict[tuple[int, int, int], int] = {}
        self.ready_at: dict[tuple[int, int, int], int] = {}
        self.clock: list[tuple[int, int]] = []
        self._prepare()

    def _largest_units(self, step: Step) -> list[int]:
        """The most that one unit holds on each rank; raises if that exceeds the limit."""
        largest = [0] * len(self.ranks)
        totals = [[0] * len(step.units) for _ in self.ranks]
        for m, path in enumerate(self.paths):
            for stage in path:
                rank = self.rank_of[stage]
                totals[rank][self.unit_of[m]] += self.sizes[stage][m]
                self.ranks[rank].ended[self.unit_of[m]] += 1
        for rank, total in enumerate(totals):
            largest[rank] = max(total, default=0)
            if largest[rank] > self.most_held[rank]:
                first, stop = step.units[total.index(largest[rank])].tolist()
                which = "the largest micro-batch alone needs"
                if stop - first > 1:
                    which = f"{stop - first} micro-batches that share a document need"
                raise FitError(
                    f"Rank {rank} may hold {self.most_held[rank]:,} at a time, but {which} "
                    f"{largest[rank]:,}. Allow that much, or make micro-batches smaller."
                )
        return largest

    def _prepare(self) -> None:
        """Count what every operation waits for, and mark the first ones ready."""
        unit_of = self.unit_of
        visited = [set(path) for path in self.paths]
        for m, path in enumerate(self.paths):
            follows = m > 0 and unit_of[m - 1] == unit_of[m]
            leads = m + 1 < len(unit_of) and unit_of[m + 1] == unit_of[m]
            for stage in path:
                after_slice = follows and stage in visited[m - 1]
                self.needs[F, stage, m] = (self.before[stage][m] >= 0) + after_slice
                self.needs[I, stage, m] = 1 + (leads and stage in visited[m + 1])
                if not self.needs[F, stage, m]:
                    self._arrive(0, F, stage, m)

    def _arrive(self, time: int, op: int, stage: int, m: int) -> None:
        rank = self.rank_of[stage]
        heapq.heappush(self.ranks[rank].arrivals, (time, op, stage, m))
        heapq.heappush(self.clock, (time, rank))

    def run(self) -> list[Order]:
        """Run every rank to its end."""
        while self.clock:
            time, at = heapq.heappop(self.clock)
            while self.clock and self.clock[0] == (time, at):
                heapq.heappop(self.clock)
            rank = self.ranks[at]
            if rank.free_at > time:
                continue
            while rank.arrivals and rank.arrivals[0][0] <= time:
                _, op, stage, m = heapq.heappop(rank.arrivals)
                heap = rank.forwards if op == F else rank.backwards
                heapq.heappush(heap, (self.unit_of[m], m if op == F else -m, -stage))
            chosen = self._choose(at, rank, time)
            if chosen is not None:
                self._start(at, rank, time, *chosen)
        return [rank.order for rank in self.ranks]

    def _choose(self, at: int, rank: _Rank, time: int) -> tuple[int, int, int] | None:
        forward = self._admitted(at, rank)
        if rank.backwards and not (self.taste.in_turn and rank.last == I and forward):
            _, m, stage = heapq.heappop(rank.backwards)
            return I, -stage, -m
        due = rank.arrivals[0][0] if rank.arrivals else None
        if forward is not None:
            stage, m = -forward[2], forward[1]
            gradient = min((a[0] for a in rank.arrivals if a[1] == I), default=None)
            keeps = gradient is not None and gradient < time + self.takes[F][stage][m] // 2
            if not (self.taste.patient and keeps):
                rank.forwards.remove(forward)
                heapq.heapify(rank.forwards)
                return F, stage, m
        if rank.weights:
            stage, m = rank.weights[0]
            late = due is not None and due < time + self.takes[W][stage][m] // 2
            if not late or not self.taste.patient or (rank.forwards and forward is None):
                rank.weights.popleft()
                return W, stage, m
        return None

    def _admitted(self, at: int, rank: _Rank) -> tuple[int, int, int] | None:
        """The first ready forward that has room, preferring the oldest unit."""
        if not rank.forwards:
            return None
        first = rank.forwards[0]
        unit, m, stage = first
        size = self.sizes[-stage][m]
        if unit == rank.oldest:
            return first if rank.held + size <= self.most_held[at] else None
        mine = rank.held_by[rank.oldest] if rank.oldest < len(rank.held_by) else 0
        kept = max(self.most_unit[at] - mine, 0)
        return first if rank.held + size + kept <= self.most_held[at] else None

    def _start(self, at: int, rank: _Rank, time: int, op: int, stage: int, m: int) -> None:
        unit, size = self.unit_of[m], self.sizes[stage][m]
        end = time + self.takes[op][stage][m]
        rank.free_at = end
        if op != W:
            rank.last = op
        rank.order.append((op, stage, m))
        if op == W:
            rank.held -= size
            rank.held_by[unit] -= size
        elif op == F:
            rank.held += size
            rank.held_by[unit] += size
            after = self.after[stage][m]
            if after >= 0:
                self._feed(end, at, F, after, m)
            else:
                self._feed(end, at, I, stage, m)
            if (F, stage, m + 1) in self.needs and self._is_same_unit(m, m + 1):
                self._feed(end, at, F, stage, m + 1)
        else:
            rank.weights.append((stage, m))
            rank.ended[unit] -= 1
            while rank.oldest < len(rank.ended) and not rank.ended[rank.oldest]:
                rank.oldest += 1
            if self.before[stage][m] >= 0:
                self._feed(end, at, I, self.before[stage][m], m)
            if (I, stage, m - 1) in self.needs and self._is_same_unit(m - 1, m):
                self._feed(end, at, I, stage, m - 1)
        heapq.heappush(self.clock, (end, at))

    def _is_same_unit(self, one: int, other: int) -> bool:
        return self.unit_of[one] == self.unit_of[other]

    def _feed(self, end: int, at: int, op: int, stage: int, m: int) -> None:
        """Record that something an operation waits for has ended; start it if it was the last."""
        key = op, stage, m
        arrives = end if self.rank_of[stage] == at else end + self.hops[m]
        self.ready_at[key] = max(self.ready_at.get(key, 0), arrives)
        self.needs[key] -= 1
        if not self.needs[key]:
            self._arrive(self.ready_at[key], op, stage, m)
