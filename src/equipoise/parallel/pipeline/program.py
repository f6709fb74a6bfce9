"""One rank's part of a pipeline schedule, compiled: when to post and what to wait for.

Why
    Both ends of every message know the whole schedule, so nothing is negotiated and nothing is
    decided while ranks run.

What it decides
    A receive is posted some instructions before the one that needs it, so that its message
    travels meanwhile, and awaited just before that one. Waiting for a send never blocks: its
    tensor is released at the first receive that proves its arrival (the peer sent that message
    after it needed this one), or at the end.

Kept true (tests/unit/parallel/test_pipeline_program.py, by Hypothesis)
    Every message is posted once at each end, in the link's order, no later than needed; waiting
    for a send never blocks, whatever order a strategy chooses.
"""

import functools
from dataclasses import dataclass

import numpy as np

from equipoise.base.errors import LayoutError
from equipoise.schedule.pipeline.instruction import MICRO_BATCH, OP, STAGE, Op
from equipoise.schedule.pipeline.messages import PipelineMessage, list_messages, rank_messages
from equipoise.schedule.pipeline.schedule import Neighbours, PipelineSchedule

AHEAD = 4
"""Instructions before its use at which a receive is posted: two forwards and two backwards."""


@dataclass(frozen=True, slots=True)
class Sent:
    """An outgoing message, and the place from which on it is known to have arrived."""

    message: PipelineMessage
    due: int


@dataclass(frozen=True, slots=True)
class Slot:
    """One instruction, and what travels before and after it."""

    op: Op
    stage: int
    micro_batch: int
    receives: tuple[PipelineMessage, ...]
    """Posted before it; each is needed at its ``needed_at``."""
    send: Sent | None
    """The message it sends, if the next stage on the path is on another rank."""
    next_stage: int
    """The stage that takes its result: -1 for none."""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineProgram:
    """What one rank does."""

    rank: int
    held: tuple[int, ...]
    """Its stages."""
    slots: tuple[Slot, ...]

    @property
    def end(self) -> int:
        """The place after its last instruction."""
        return len(self.slots)


def require_runnable(schedule: PipelineSchedule) -> None:
    """Refuse a schedule that this executor cannot run.

    Raises:
        LayoutError: a path skips the first or the last stage.
    """
    last = schedule.paths.shape[1] - (schedule.paths[:, ::-1] >= 0).argmax(axis=1) - 1
    ends = schedule.paths[np.arange(schedule.micro_batches), last]
    wrong = (schedule.paths[:, 0] != 0) | (ends != schedule.stages - 1)
    for at in np.flatnonzero(wrong)[:1].tolist():
        raise LayoutError(
            f"Micro-batch {at} goes from stage {schedule.paths[at, 0]} to stage {ends[at]} of "
            f"{schedule.stages}. Give every path the first stage, which embeds, and the last, "
            f"which has the loss."
        )


@functools.lru_cache(maxsize=64)
def compile_rank(
    schedule: PipelineSchedule, rank: int, empty: frozenset[int] = frozenset(), ahead: int = AHEAD
) -> PipelineProgram:
    """Compile one rank's part.

    Args:
        schedule: A schedule that ``check_pipeline`` accepts.
        rank: The rank to compile for.
        empty: Micro-batches without a token: they are computed, but send nothing.
        ahead: Number of instructions before its use at which a receive is posted, >= 0.

    Raises:
        LayoutError: the executor cannot run it.

    Cost: O(instructions of all ranks x log).
    """
    require_runnable(schedule)
    full = tuple(m for m in list_messages(schedule) if m.micro_batch not in empty)
    mine = rank_messages(full, rank)
    order = schedule.orders[rank]
    beside = Neighbours.of(schedule.paths, schedule.stages)
    receives: list[list[PipelineMessage]] = [[] for _ in order]
    at = len(order)
    for message in reversed(mine.receives):
        at = min(at, message.needed_at)
        receives[max(0, at - ahead)].insert(0, message)
    sends = {
        message.sent_at: Sent(message, _known_at(message, mine.receives, len(order)))
        for message in mine.sends
    }
    slots = []
    for place, row in enumerate(order.tolist()):
        op, stage, micro_batch = Op(row[OP]), row[STAGE], row[MICRO_BATCH]
        table = beside.after if op == Op.FORWARD else beside.before
        following = -1 if op == Op.BACKWARD_WEIGHT else int(table[stage, micro_batch])
        slots.append(
            Slot(op, stage, micro_batch, tuple(receives[place]), sends.get(place), following)
        )
    held = tuple(np.flatnonzero(schedule.rank_of == rank).tolist())
    return PipelineProgram(rank, held, tuple(slots))


def _known_at(sent: PipelineMessage, receives: tuple[PipelineMessage, ...], end: int) -> int:
    """The first place at which a receive proves that a sent message has arrived."""
    proofs = (
        each.needed_at
        for each in receives
        if each.source == sent.target and each.sent_at >= sent.needed_at
    )
    return min(proofs, default=end)
