"""Schedules in a V: two stages a rank, down the ranks and back up.

Why
    In a loop the first rank holds activations longest and the last one shortest. In a V each
    rank has one early and one late stage, so all hold equally much, and the pace decides how
    much: the slower a micro-batch travels, the more are in flight and the fewer gaps remain.

What it decides
    ``zb-v`` holds as much as 1F1B. Each rank fills up, first with its stage on the way down,
    then with both alternately, and then alternates forward and backward of each. At equal prices
    no rank waits between its first and its last instruction.

    ``v-half`` and ``v-min`` repeat one *building block* every six slots, one slot for each of a
    rank's two forwards, input gradients and weight gradients. Its pace is the number of slots
    from rank to rank on each of its four legs::

                 forward down, up   gradient down, up   held, of 1F1B   bubble, of 1F1B
        v-min         1     1            1      1             1/3             2/3
        v-half        1     2            1      2             1/2             1/2

    A leg begins at the first slot where it collides with no other leg on any rank. That orders
    forwards and input gradients; in all three, weight gradients are filled into gaps.

    ``dualpipe-v`` is DualPipe's order folded into a V: each rank runs a forward of one direction
    beside a backward of the other, which an executor may overlap. It needs twice as many
    micro-batches as ranks. Most of its backwards are whole.

Kept true (tests/unit/schedule/pipeline/test_strategies.py)
    In-flight activations and bubble rates of all four equal the published ones.

Sources
    Building blocks, and what they hold: Pipeline Parallelism with Controllable Memory,
    arXiv:2405.15362, section 3; the paces are this file's own, chosen to hold equally much.
    zb-v: arXiv:2401.10241, in its later versions. dualpipe-v: github.com/deepseek-ai/DualPipe.
"""

from dataclasses import dataclass
from itertools import count

from equipoise.base.errors import LayoutError
from equipoise.schedule.pipeline.instruction import Op
from equipoise.schedule.pipeline.replay import replay_pipeline
from equipoise.schedule.pipeline.request import PipelineRequest, remembered
from equipoise.schedule.pipeline.schedule import Order, PipelineSchedule
from equipoise.schedule.pipeline.zero_bubble import finish_filled

F, B = int(Op.FORWARD), int(Op.BACKWARD)
I, W = int(Op.BACKWARD_INPUT), int(Op.BACKWARD_WEIGHT)  # noqa: E741

_SLOTS = 6
"""Slots of one building block: forward, input and weight gradient of two stages."""

_MOST_SLACK = 2
"""Most stages whose weight gradients a block delays: both of a rank."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Slots from rank to rank on each kind of leg."""

    down: int
    up: int


HALF, LEAST = Pace(1, 2), Pace(1, 1)
"""Paces of v-half and v-min."""


def zb_v(request: PipelineRequest) -> PipelineSchedule:
    """1F1B's memory, without gaps between first and last instruction at equal prices."""
    return finish_filled(request, order_zb_v(request))


@remembered
def order_zb_v(request: PipelineRequest) -> PipelineSchedule:
    """The order of ``zb-v`` without weight gradients."""
    request.need_chunks(2)
    request.need_whole_documents()
    return request.finish([_zb_v_rank(request, rank) for rank in range(request.ranks)], in_v=True)


def _zb_v_rank(request: PipelineRequest, rank: int) -> Order:
    """One rank's order for at least 2 p - 1 micro-batches, minus those that do not exist."""
    down, up = rank, 2 * request.ranks - 1 - rank
    behind = request.ranks - rank
    count = max(2 * request.ranks - 1, request.micro_batches)
    writer = _Writer([], {}, [])
    for _ in range(2 * behind - 1):
        writer.add(F, down)
    for _ in range(rank):
        writer.add(F, up)
        writer.add(F, down)
    for _ in range(behind):
        writer.add(F, up)
        writer.add(I, up)
    for at in range(count - behind):
        if at < count - 2 * behind + 1 - rank:
            writer.add(F, down)
        writer.add(I, down)
        if at < count - request.ranks:
            writer.add(F, up)
        writer.add(I, up)
    for _ in range(behind):
        writer.add(I, down)
    return [each for each in writer.order if each[2] < request.micro_batches]


def v_half(request: PipelineRequest) -> PipelineSchedule:
    """Hold half of what 1F1B holds."""
    return _build(request, HALF)


def v_min(request: PipelineRequest) -> PipelineSchedule:
    """Hold a third of what 1F1B holds."""
    return _build(request, LEAST)


def _build(request: PipelineRequest, pace: Pace) -> PipelineSchedule:
    """Fill weight gradients in the least memory that costs no more time than own slots for them."""
    request.need_chunks(2)
    request.need_whole_documents()
    in_slots = lay_blocks(request, pace, weights=True)
    goal = replay_pipeline(in_slots, request.prices).makespan_ns
    bare = lay_blocks(request, pace, weights=False)
    for slack in range(_MOST_SLACK):
        filled = finish_filled(request, bare, slack=slack)
        if replay_pipeline(filled, request.prices).makespan_ns <= goal:
            return filled
    return finish_filled(request, bare, slack=_MOST_SLACK)


@remembered
def lay_blocks(request: PipelineRequest, pace: Pace, *, weights: bool) -> PipelineSchedule:
    """Each rank's order, with one building block per micro-batch.

    With ``weights``, weight gradients have slots of their own; else they are left out.
    """
    ranks, last = request.ranks, 2 * request.ranks - 1
    starts = _leg_starts(ranks, pace)
    orders: list[Order] = []
    for rank in range(ranks):
        slots = _slots_of(rank, ranks, pace, starts)
        legs = [(F, rank), (F, last - rank), (I, last - rank), (I, rank)]
        if weights:
            for at in (2, 3) if slots[2] < slots[3] else (3, 2):
                taken = {slot % _SLOTS for slot in slots}
                free = (slot for slot in count(slots[at] + 1) if slot % _SLOTS not in taken)
                slots.append(next(free))
                legs.append((W, legs[at][1]))
        timed = [
            (slot + _SLOTS * m, op, stage, m)
            for slot, (op, stage) in zip(slots, legs, strict=True)
            for m in range(request.micro_batches)
        ]
        orders.append([(op, stage, m) for _, op, stage, m in sorted(timed)])
    return request.finish(orders, in_v=True)


def _slots_of(rank: int, ranks: int, pace: Pace, starts: list[int]) -> list[int]:
    """When a rank runs the legs of micro-batch 0: forward down, up, gradient down, up."""
    behind = ranks - 1 - rank
    ways = (pace.down * rank, pace.up * behind, pace.down * rank, pace.up * behind)
    return [start + way for start, way in zip(starts, ways, strict=False)]


def _leg_starts(ranks: int, pace: Pace) -> list[int]:
    """The first slot of each leg, as early as its predecessor and the other legs allow."""
    starts = [0]
    for leg in range(1, 4):
        length = (pace.down if leg % 2 else pace.up) * (ranks - 1)
        begin = starts[-1] + length + 1
        while not _is_apart(ranks, pace, [*starts, begin]):
            begin += 1
        starts.append(begin)
    return starts


def _is_apart(ranks: int, pace: Pace, starts: list[int]) -> bool:
    """Whether no rank has two of these legs in one slot of a block."""
    every = (_slots_of(rank, ranks, pace, starts) for rank in range(ranks))
    return all(len({slot % _SLOTS for slot in slots}) == len(starts) for slots in every)


@remembered
def dualpipe_v(request: PipelineRequest) -> PipelineSchedule:
    """Run a forward of one direction beside a backward of the other."""
    request.need_chunks(2)
    request.need_whole_documents()
    if request.micro_batches < 2 * request.ranks:
        raise LayoutError(
            f"dualpipe-v needs {2 * request.ranks} micro-batches on {request.ranks} ranks; there "
            f"are {request.micro_batches}. Take zb-v, which runs any number."
        )
    orders = [_dualpipe_rank(request, rank) for rank in range(request.ranks)]
    return request.finish(orders, in_v=True)


def _dualpipe_rank(request: PipelineRequest, rank: int) -> Order:
    down, up = rank, 2 * request.ranks - 1 - rank
    behind, ahead = request.ranks - 1 - rank, rank + 1
    writer = _Writer([], {}, [])
    for _ in range(2 * behind):
        writer.add(F, down)
    for _ in range(ahead):
        writer.add(F, down)
        writer.add(F, up)
    for _ in range(behind):
        writer.add(I, up)
        writer.add_weight()
        writer.add(F, up)
    for _ in range(request.micro_batches - 2 * request.ranks + ahead):
        for one, other in ((down, up), (up, down)):
            writer.add(F, one)
            writer.add(B, other)
    for _ in range(behind):
        writer.add(B, up)
        writer.add(F, up)
        writer.add(B, down)
    first_split = 2 * (ahead // 2) + (0 if rank % 2 else 1)
    for at, stage in enumerate([up, down] * ahead):
        writer.add(I if at >= first_split else B, stage)
    for _ in range(behind):
        writer.add_weight()
        writer.add(I, down)
    while writer.pending:
        writer.add_weight()
    return writer.order


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes an order, and counts micro-batches itself."""

    order: Order
    counts: dict[tuple[bool, int], int]
    """Next micro-batch of each (is_forward, stage)."""
    pending: list[tuple[int, int]]
    """Pending weight gradients, oldest first."""

    def add(self, op: int, stage: int) -> None:
        micro_batch = self.counts.get((op == F, stage), 0)
        self.counts[op == F, stage] = micro_batch + 1
        self.order.append((op, stage, micro_batch))
        if op == I:
            self.pending.append((stage, micro_batch))

    def add_weight(self) -> None:
        if self.pending:
            stage, micro_batch = self.pending.pop(0)
            self.order.append((W, stage, micro_batch))
