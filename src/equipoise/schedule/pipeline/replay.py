"""Replay a pipeline's step to predict when each instruction begins and ends.

What it decides
    A rank runs its instructions in order, one at a time; one begins when the previous one has
    ended and what it needs has arrived. Messages overlap computation, arrive a hop after their
    producer ends, and do not queue. There is no closed form, so stages and micro-batches may
    all differ.

    In-flight activations are counted, not timed: the order of a rank's instructions says how
    many it holds. See ``prices`` for what counts as one.

Kept true (tests/unit/schedule/pipeline/test_replay.py)
    Busy plus idle time is the makespan on every rank; the makespan is never below
    ``bound_pipeline`` and equals the longest path through the dependency graph; bubble rates
    equal a published table's to the last digit.

Sources
    Bubble rates from T_F, T_B, T_W and T_comm: arXiv:2401.10241, tables 5 and 6.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import CheckError
from equipoise.schedule.compiled import run_loop
from equipoise.schedule.pipeline.instruction import Op
from equipoise.schedule.pipeline.prices import PipelinePrices
from equipoise.schedule.pipeline.schedule import Neighbours, PipelineSchedule
from equipoise.schedule.pipeline.sweep import sweep


@dataclass(frozen=True, slots=True, eq=False)
class PipelineTimeline:
    """When each instruction ran, predicted by ``replay_pipeline`` or measured; one row each."""

    name: str
    """What the rows show, for titles."""
    ranks: int
    """Number of ranks; one may have no row."""
    rank: Ints
    op: Ints
    stage: Ints
    micro_batch: Ints
    begin_ns: Ints
    end_ns: Ints

    @property
    def makespan_ns(self) -> int:
        """Time from the first begin to the last end [ns]."""
        if not len(self.rank):
            return 0
        return int(self.end_ns.max() - self.begin_ns.min())

    @property
    def busy_ns(self) -> Ints:
        """Time that each rank computes, int64 [ranks] [ns]."""
        busy = np.zeros(self.ranks, dtype=np.int64)
        np.add.at(busy, self.rank, self.end_ns - self.begin_ns)
        return busy

    @property
    def idle_ns(self) -> Ints:
        """Time that each rank waits during the makespan, int64 [ranks] [ns]."""
        idle: Ints = self.makespan_ns - self.busy_ns
        return idle

    @property
    def span_ns(self) -> Ints:
        """Time from each rank's first begin to its last end, int64 [ranks] [ns]."""
        first = np.full(self.ranks, np.iinfo(np.int64).max)
        last = np.zeros(self.ranks, dtype=np.int64)
        np.minimum.at(first, self.rank, self.begin_ns)
        np.maximum.at(last, self.rank, self.end_ns)
        span: Ints = np.maximum(last - first, 0)
        return span

    @property
    def bubble_rate(self) -> float:
        """Share of the ranks' time spent waiting: 1 - mean busy / makespan."""
        return _rate(self.busy_ns, self.makespan_ns)

    @property
    def span_bubble_rate(self) -> float:
        """``bubble_rate`` over the longest span of a rank instead of the makespan.

        This is the rate if steps follow each other without a barrier, as with an optimizer
        that is validated afterwards.
        """
        return _rate(self.busy_ns, int(self.span_ns.max(initial=0)))


def _rate(busy_ns: Ints, cost_ns: int) -> float:
    return 1.0 - float(busy_ns.mean()) / cost_ns if cost_ns else 0.0


_HOLDS = np.array([1, -1, 0, -1])
"""What each ``Op`` adds to what its rank holds, with the W stash counted whole."""

_HOLDS_INPUT = np.array([1, -1, -1, 0])
"""The same, with activations held until the input gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """The most that each rank holds, int64 [ranks], in the unit of the activations."""

    peak: Ints
    """Peak with activations held from forward to weight gradient (W stash counted whole)."""
    peak_without_stash: Ints
    """Peak with activations held from forward to input gradient."""


def count_in_flight(schedule: PipelineSchedule, activation: Ints | None = None) -> InFlight:
    """Count the most that each rank holds at a time.

    Args:
        schedule: The schedule to count.
        activation: What each forward leaves behind, int64 [stages, micro-batches]; 1 each
            unless given, and then ``peak`` times ranks over stages is in whole activations.
    """
    op, stage, micro_batch = np.concatenate(schedule.orders).T
    sizes = 1 if activation is None else activation[stage, micro_batch]
    starts = np.cumsum([0, *(len(each) for each in schedule.orders)])
    return InFlight(*(_peaks(sign[op] * sizes, starts) for sign in (_HOLDS, _HOLDS_INPUT)))


def _peaks(steps: Ints, starts: Ints) -> Ints:
    """The most that each rank's running sum reaches, at least 0."""
    peaks = np.zeros(len(starts) - 1, dtype=np.int64)
    if len(steps):
        works = starts[:-1] < starts[1:]
        sums = np.cumsum(steps)
        first = starts[:-1][works]
        begins = sums[first] - steps[first]
        peaks[works] = np.maximum(np.maximum.reduceat(sums, first) - begins, 0)
    return peaks


def needed_places(schedule: PipelineSchedule) -> tuple[Ints, Ints]:
    """What each instruction waits for beside its rank's previous one.

    Returns:
        Two tables over all instructions, rank by rank, int64 [n]: the place of what it waits for
        in the same numbering, -1 if nothing, -2 if no rank does it; and 1 if that comes from
        another rank, else 0.
    """
    table = np.concatenate(schedule.orders)
    op, stage, micro_batch = table.T
    count = len(table)
    place = np.full((3, schedule.stages, schedule.micro_batches), -2, dtype=np.int64)
    kind = np.array([0, 1, 1, 2])[op]
    every = np.arange(count)
    place[kind, stage, micro_batch] = every
    whole = op == Op.BACKWARD
    place[2, stage[whole], micro_batch[whole]] = every[whole]
    beside = Neighbours.of(schedule.paths, schedule.stages)
    needs = np.full(count, -1, dtype=np.int64)
    forward, weight = kind == 0, kind == 2
    backward = kind == 1
    before = beside.before[stage, micro_batch]
    after = beside.after[stage, micro_batch]
    chosen = forward & (before >= 0)
    needs[chosen] = place[0, before[chosen], micro_batch[chosen]]
    chosen = backward & (after >= 0)
    needs[chosen] = place[1, after[chosen], micro_batch[chosen]]
    chosen = backward & (after < 0)
    needs[chosen] = place[0, stage[chosen], micro_batch[chosen]]
    needs[weight] = place[1, stage[weight], micro_batch[weight]]
    ranks = np.repeat(np.arange(schedule.ranks), [len(each) for each in schedule.orders])
    travels = (needs >= 0) & (ranks[np.maximum(needs, 0)] != ranks)
    return needs, travels.astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class OrderRun:
    """How far instructions get if each runs as soon as what it needs has arrived."""

    begin_ns: Ints
    """Begin of each instruction, int64 [n]; -1 if it never runs."""
    end_ns: Ints
    now: Ints
    """The place that each rank reached, int64 [ranks]."""
    done: int
    """Number of instructions that ran."""


def run_order(
    starts: Ints, needs: Ints, takes: Ints | None = None, hops: Ints | None = None
) -> OrderRun:
    """Run all instructions as soon as what they need has arrived.

    Args:
        starts: First place of each rank's instructions, and one past the last of all.
        needs: What each waits for, from ``needed_places``.
        takes: Time of each; 0 unless given.
        hops: Travel time of what each waits for; 0 unless given.
    """
    count, ranks = len(needs), len(starts) - 1
    nothing = np.zeros(count, dtype=np.int64)
    begin, end, waiting = np.full((3, count), -1, dtype=np.int64)
    now, moving, following = np.empty((3, ranks), dtype=np.int64)
    done = run_loop(
        sweep,
        count,
        *(starts, needs, nothing if takes is None else takes, nothing if hops is None else hops),
        *(waiting, following, moving, now, begin, end),
    )
    return OrderRun(begin, end, now, done)


def replay_pipeline(schedule: PipelineSchedule, prices: PipelinePrices) -> PipelineTimeline:
    """Predict when each instruction begins and ends.

    Raises:
        CheckError: the ranks deadlock; ``check_pipeline`` says where.

    Cost: O(instructions).
    """
    table = np.concatenate(schedule.orders)
    op, stage, micro_batch = table.T.copy()
    needs, travels = needed_places(schedule)
    takes = prices.of_ops()[op, stage, micro_batch]
    starts = np.concatenate(([0], np.cumsum([len(each) for each in schedule.orders])))
    run = run_order(starts, needs, takes, prices.hop_ns[micro_batch] * travels)
    if run.done < len(table):
        stuck = np.flatnonzero(run.now < starts[1:])
        raise CheckError(
            f"{schedule.strategy}: {len(stuck)} of {schedule.ranks} ranks wait for ever, rank "
            f"{stuck[0]} first. check_pipeline says for what."
        )
    ranks = np.repeat(np.arange(schedule.ranks), np.diff(starts))
    return PipelineTimeline(
        schedule.strategy, schedule.ranks, ranks, op, stage, micro_batch, run.begin_ns, run.end_ns
    )
