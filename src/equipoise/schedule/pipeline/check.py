"""Prove a pipeline schedule correct before a rank runs it.

Why
    A dropped instruction hangs a run or silently trains on wrong gradients. Both are visible in
    the schedule.

What it decides
    A schedule is correct if

    - every rank lists only stages that it holds, on the path of the micro-batch;
    - every micro-batch has on each stage of its path one forward and one backward, whole or in
      two halves, in that order on its rank;
    - within a unit, a stage runs forwards in order and backwards in reverse;
    - no ranks wait for each other: a send is buffered and never blocks, a receive blocks only
      the instruction that needs it;
    - no rank holds more activations at a time than allowed;
    - every micro-batch visits every stage in order, unless skipping is intended.

Kept true (tests/unit/schedule/pipeline/test_check.py)
    What strategies write passes; with any instruction dropped, doubled or misplaced it fails,
    and the message says where.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import CheckError, FitError
from equipoise.schedule.pipeline.instruction import MICRO_BATCH, OP, STAGE, Op, name_instruction
from equipoise.schedule.pipeline.replay import count_in_flight, needed_places, run_order
from equipoise.schedule.pipeline.schedule import Neighbours, PipelineSchedule


def find_faults(schedule: PipelineSchedule) -> Iterator[str]:
    """Yield each fault of a schedule as a sentence.

    A check runs only if the checks that it builds on passed.
    """
    for check in (_placement_faults, _count_faults, _order_faults, _unit_faults, _deadlock_faults):
        is_right = True
        for fault in check(schedule):
            is_right = False
            yield fault
        if not is_right:
            return


def check_pipeline(
    schedule: PipelineSchedule,
    *,
    activation: Ints | None = None,
    most_held: Sequence[int] | Ints | None = None,
    allow_lossy: bool = False,
) -> None:
    """Refuse an incorrect schedule.

    Args:
        schedule: The schedule to check.
        activation: What each forward leaves behind, int64 [stages, micro-batches]; 1 each
            unless given.
        most_held: The most that each rank may hold, in that unit; no limit unless given.
        allow_lossy: Whether micro-batches may skip stages, or take them out of order.

    Raises:
        CheckError: the first fault, in one sentence.
        FitError: a rank holds more than it may.

    Cost: O(instructions).
    """
    for fault in find_faults(schedule):
        raise CheckError(f"{schedule.strategy}: {fault}")
    if schedule.is_lossy and not allow_lossy:
        whole = np.arange(schedule.stages)
        width = schedule.paths.shape[1]
        first = 0
        if width == len(whole):
            first = int(np.flatnonzero((schedule.paths != whole).any(axis=1))[0])
        path = " ".join(str(stage) for stage in schedule.paths[first].tolist() if stage >= 0)
        raise CheckError(
            f"{schedule.strategy}: Micro-batch {first} takes the path {path} through "
            f"{schedule.stages} stages, which trains another model. Pass allow_lossy=True if that "
            f"is meant."
        )
    if most_held is None:
        return
    over = find_excess(schedule, activation, np.asarray(most_held, dtype=np.int64))
    if over is not None:
        rank, held, allowed = over
        raise FitError(
            f"{schedule.strategy}: Rank {rank} holds {held:,} at a time; the limit is {allowed:,}. "
            f"Take a strategy that holds less, such as v-half or auto, or raise the bound."
        )


def find_excess(
    schedule: PipelineSchedule, activation: Ints | None, most_held: Ints
) -> tuple[int, int, int] | None:
    """The rank furthest above its limit, what it holds, and the limit."""
    held = count_in_flight(schedule, activation).peak
    worst = int((held - most_held).argmax())
    if held[worst] <= most_held[worst]:
        return None
    return worst, int(held[worst]), int(most_held[worst])


def _placement_faults(schedule: PipelineSchedule) -> Iterator[str]:
    beside = Neighbours.of(schedule.paths, schedule.stages)
    for rank, table in enumerate(schedule.orders):
        op, stage, micro_batch = table[:, OP], table[:, STAGE], table[:, MICRO_BATCH]
        known = (op >= 0) & (op < len(Op)) & (stage >= 0) & (stage < schedule.stages)
        known &= (micro_batch >= 0) & (micro_batch < schedule.micro_batches)
        for at in np.flatnonzero(~known)[:1].tolist():
            yield (
                f"Rank {rank} has operation {op[at]} of micro-batch {micro_batch[at]} on stage "
                f"{stage[at]} at place {at}; there are {len(Op)} operations, "
                f"{schedule.micro_batches} micro-batches and {schedule.stages} stages."
            )
            return
        for at in np.flatnonzero(schedule.rank_of[stage] != rank)[:1].tolist():
            yield (
                f"Rank {rank} has the {name_instruction(*table[at].tolist())} at place {at}, but "
                f"that stage is on rank {schedule.rank_of[stage[at]]}."
            )
            return
        for at in np.flatnonzero(beside.before[stage, micro_batch] == -2)[:1].tolist():
            yield (
                f"Rank {rank} has the {name_instruction(*table[at].tolist())} at place {at}, but "
                f"that stage is not on the micro-batch's path."
            )
            return


def _count_faults(schedule: PipelineSchedule) -> Iterator[str]:
    counts = np.zeros((len(Op), schedule.stages, schedule.micro_batches), dtype=np.int64)
    for table in schedule.orders:
        np.add.at(counts, (table[:, OP], table[:, STAGE], table[:, MICRO_BATCH]), 1)
    visited = (Neighbours.of(schedule.paths, schedule.stages).before != -2).astype(np.int64)
    whole = counts[Op.BACKWARD]
    for name, times in (
        ("forward", counts[Op.FORWARD]),
        ("input gradient", whole + counts[Op.BACKWARD_INPUT]),
        ("weight gradient", whole + counts[Op.BACKWARD_WEIGHT]),
    ):
        for stage, micro_batch in np.argwhere(times != visited)[:1].tolist():
            yield (
                f"Stage {stage} computes the {name} of micro-batch {micro_batch} "
                f"{times[stage, micro_batch]} times instead of once."
            )
            return


def _order_faults(schedule: PipelineSchedule) -> Iterator[str]:
    """On one rank: forward, then input gradient, then weight gradient."""
    for rank, table in enumerate(schedule.orders):
        places = _places(schedule, table)
        for one, other, names in ((0, 1, (0, 2)), (1, 2, (2, 3))):
            wrong = (places[one] > places[other]) & (places[one] >= 0)
            for stage, micro_batch in np.argwhere(wrong)[:1].tolist():
                early, late = names
                yield (
                    f"Rank {rank} has the {name_instruction(late, stage, micro_batch)} at place "
                    f"{places[other, stage, micro_batch]}, before its {Op(early).words} at place "
                    f"{places[one, stage, micro_batch]}."
                )
                return


def _places(schedule: PipelineSchedule, table: Ints) -> Ints:
    """Places of forward, input and weight gradient on a rank, int64 [3, stages, micro-batches].

    -1 if absent. A whole backward is the place of both gradients.
    """
    places = np.full((3, schedule.stages, schedule.micro_batches), -1, dtype=np.int64)
    kind = np.array([0, 1, 1, 2])[table[:, OP]]
    every = np.arange(len(table))
    places[kind, table[:, STAGE], table[:, MICRO_BATCH]] = every
    whole = table[:, OP] == Op.BACKWARD
    places[2, table[whole, STAGE], table[whole, MICRO_BATCH]] = every[whole]
    return places


def _unit_faults(schedule: PipelineSchedule) -> Iterator[str]:
    """Within a unit: forwards in order, backwards in reverse."""
    joined = np.flatnonzero(np.diff(schedule.unit_of) == 0)
    if not len(joined):
        return
    for rank, table in enumerate(schedule.orders):
        places = _places(schedule, table)
        here = places[:2, :, joined], places[:2, :, joined + 1]
        both = (here[0] >= 0) & (here[1] >= 0)
        wrong = both & np.stack((here[0][0] > here[1][0], here[0][1] < here[1][1]))
        for kind, stage, at in np.argwhere(wrong)[:1].tolist():
            first = int(joined[at])
            early, late = (first, first + 1) if kind else (first + 1, first)
            words = ("forward", "input gradient")[kind]
            yield (
                f"Rank {rank} has the {words} of micro-batch {early} on stage {stage} before that "
                f"of micro-batch {late}. They are slices of one document: forwards must run in "
                f"order and backwards in reverse."
            )
            return


def _deadlock_faults(schedule: PipelineSchedule) -> Iterator[str]:
    needs, _ = needed_places(schedule)
    lengths = [len(table) for table in schedule.orders]
    starts = np.cumsum([0, *lengths])
    now = run_order(starts, needs).now.tolist()
    table = np.concatenate(schedule.orders)
    for rank, at in enumerate(now):
        if at == starts[rank + 1]:
            continue
        need = int(needs[at])
        peer = int(np.searchsorted(starts, need, side="right")) - 1
        yield (
            f"Rank {rank} waits at place {at - starts[rank]}, the "
            f"{name_instruction(*table[at].tolist())}, for the "
            f"{name_instruction(*table[need].tolist())}, which rank {peer} has at place "
            f"{need - starts[peer]}, and rank {peer} waits at place {now[peer] - starts[peer]}."
        )
        return
