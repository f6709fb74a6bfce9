"""What a pipeline's step takes, before it is run: every instruction's begin and end.

What it decides
    The schedule is replayed. A rank runs its instructions in order, one at a time; one begins
    when the rank's last has ended and what it needs has arrived. Messages travel beside
    computation, each a hop after its producer has ended, and do not queue. No closed form is
    used, so stages and micro-batches may all differ.

    In-flight activations are counted, not timed: the order of a rank's own instructions says
    how many it holds. See ``pipeline_prices`` for what counts as one.

Kept true (tests/unit/schedule/pipeline/test_replay.py)
    Busy and idle are the makespan on every rank; the makespan is never below
    ``bound_pipeline``, and equals the longest path through the graph of what waits for what;
    bubble rates of a published table, to its last digit.

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
    """When what happened: predicted by ``replay_pipeline``, or measured. A row an instruction."""

    name: str
    """What the rows are, for titles."""
    ranks: int
    """How many ranks take part; one without a row is legal."""
    rank: Ints
    op: Ints
    stage: Ints
    micro_batch: Ints
    begin_ns: Ints
    end_ns: Ints

    @property
    def makespan_ns(self) -> int:
        """From the first begin to the last end [ns]."""
        if not len(self.rank):
            return 0
        return int(self.end_ns.max() - self.begin_ns.min())

    @property
    def busy_ns(self) -> Ints:
        """What each rank computes, int64 [ranks] [ns]."""
        busy = np.zeros(self.ranks, dtype=np.int64)
        np.add.at(busy, self.rank, self.end_ns - self.begin_ns)
        return busy

    @property
    def idle_ns(self) -> Ints:
        """What each rank waits, from the first begin to the last end of all, int64 [ranks]."""
        idle: Ints = self.makespan_ns - self.busy_ns
        return idle

    @property
    def span_ns(self) -> Ints:
        """From each rank's own first begin to its last end, int64 [ranks] [ns]."""
        first = np.full(self.ranks, np.iinfo(np.int64).max)
        last = np.zeros(self.ranks, dtype=np.int64)
        np.minimum.at(first, self.rank, self.begin_ns)
        np.maximum.at(last, self.rank, self.end_ns)
        span: Ints = np.maximum(last - first, 0)
        return span

    @property
    def bubble_rate(self) -> float:
        """Share of all ranks' time that is waiting: 1 - mean busy / makespan."""
        return _rate(self.busy_ns, self.makespan_ns)

    @property
    def span_bubble_rate(self) -> float:
        """Likewise, over the longest span of a rank.

        It is the rate of steps that follow each other without all ranks waiting for the last,
        as with an optimizer that is validated afterwards.
        """
        return _rate(self.busy_ns, int(self.span_ns.max(initial=0)))


def _rate(busy_ns: Ints, cost_ns: int) -> float:
    return 1.0 - float(busy_ns.mean()) / cost_ns if cost_ns else 0.0


_HOLDS = np.array([1, -1, 0, -1])
"""What each operation adds to what its rank holds, the W stash counted whole; by ``Op``."""

_HOLDS_INPUT = np.array([1, -1, -1, 0])
"""Likewise, until the gradient of the input."""


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """The most that each rank holds at a time, int64 [ranks], in the unit of the activations."""

    peak: Ints
    """From forward to weight gradient: the W stash counts whole."""
    peak_without_stash: Ints
    """From forward to input gradient."""


def count_in_flight(schedule: PipelineSchedule, activation: Ints | None = None) -> InFlight:
    """Count what each rank holds at the worst moment.

    Args:
        schedule: What is counted.
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
    """What each instruction waits for beside its rank's last one.

    Returns:
        Two tables over all instructions, rank by rank, int64 [n]: the place in the same
        numbering of what it waits for, and -1 for nothing, -2 for something that no rank does;
        and 1 where that comes from another rank, else 0.
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
    """How far instructions come that run as soon as what they need is there."""

    begin_ns: Ints
    """Of each instruction, int64 [n]; -1 of one that never runs."""
    end_ns: Ints
    now: Ints
    """The place at which each rank stands at the end, int64 [ranks]."""
    done: int
    """Instructions that have run."""


def run_order(
    starts: Ints, needs: Ints, takes: Ints | None = None, hops: Ints | None = None
) -> OrderRun:
    """Run all instructions as soon as what they need is there.

    Args:
        starts: First place of each rank's instructions, and one past the last of all.
        needs: What each waits for, as ``needed_places`` says.
        takes: Time of each; none unless given.
        hops: Time after its end at which what each waits for arrives, likewise.
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
        CheckError: the ranks wait for each other for ever; ``check_pipeline`` says where.

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
            f"{schedule.strategy}: {len(stuck)} of {schedule.ranks} ranks wait for ever, the first "
            f"is rank {stuck[0]}. check_pipeline says for what."
        )
    ranks = np.repeat(np.arange(schedule.ranks), np.diff(starts))
    return PipelineTimeline(
        schedule.strategy, schedule.ranks, ranks, op, stage, micro_batch, run.begin_ns, run.end_ns
    )
