"""The three schedules with whole backwards: GPipe, 1F1B, interleaved.

What it decides
    ``gpipe``        all forwards, then all backwards in reverse. Holds every micro-batch.
    ``1f1b``         each rank runs one forward ahead per later rank, then alternates one
                     forward and one backward. If micro-batches share documents over time, a
                     unit's forwards come first and its backwards in reverse::

                         last stage, units (0) (1 2 3) (4)   F0 B0 F1 F2 F3 B3 B2 B1 F4 B4

    ``interleaved``  1F1B over several stages per rank: more stages shrink the bubble and add
                     messages. It runs rounds of one micro-batch per rank, or some more if these
                     do not divide: a smaller last round would deadlock.

Kept true (tests/unit/schedule/pipeline/test_strategies.py)
    In-flight activations and bubble rates equal the published ones.

Sources
    arXiv:1811.06965 (GPipe); arXiv:1806.03377 (1F1B); arXiv:2104.04473, section 2.2
    (interleaved; its warm-up of twice the ranks behind, and one round for each stage more).
"""

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.schedule.pipeline.instruction import Op
from equipoise.schedule.pipeline.request import PipelineRequest, remembered
from equipoise.schedule.pipeline.schedule import (
    Order,
    PipelineSchedule,
    finish_orders,
    single_units,
    whole_paths,
)

F, B, I = int(Op.FORWARD), int(Op.BACKWARD), int(Op.BACKWARD_INPUT)  # noqa: E741


@remembered
def gpipe(request: PipelineRequest) -> PipelineSchedule:
    """All forwards, stage after stage; then all backwards in reverse."""
    orders: list[Order] = []
    for rank in range(request.ranks):
        mine = range(rank, request.stages, request.ranks)
        ahead = [(s, m) for s in mine for m in range(request.micro_batches)]
        orders.append([(F, s, m) for s, m in ahead] + [(B, s, m) for s, m in reversed(ahead)])
    return request.finish(orders)


def forwards_alone(rank_of: Ints, micro_batches: int) -> PipelineSchedule:
    """Forwards without backwards, stage after stage, as an evaluation runs them.

    It is not a step's schedule: ``check_pipeline`` misses its backwards. No order of whole
    micro-batches deadlocks, since a stage waits only for earlier ones.

    Args:
        rank_of: The rank of each stage, int64 [stages].
        micro_batches: How many run.

    >>> forwards_alone(np.array([0, 1, 1, 0]), 2).orders[0][:, 1].tolist()
    [0, 0, 3, 3]
    """
    orders = [
        [(F, int(s), m) for s in np.flatnonzero(rank_of == rank) for m in range(micro_batches)]
        for rank in range(int(rank_of.max()) + 1)
    ]
    return PipelineSchedule(
        "forwards alone",
        rank_of,
        finish_orders(orders),
        whole_paths(len(rank_of), micro_batches),
        single_units(micro_batches),
    )


@remembered
def one_forward_one_backward(request: PipelineRequest) -> PipelineSchedule:
    """Alternate one forward and one backward; one stage per rank."""
    request.need_chunks(1)
    backwards, reach = backwards_of_units(request)
    orders: list[Order] = []
    for rank in range(request.ranks):
        order: Order = []
        for at, micro_batch in enumerate(backwards):
            ahead = min(request.micro_batches, reach[at] + request.ranks - 1 - rank)
            order += [(F, rank, m) for m in range(_forwards(order, at), ahead)]
            order.append((B, rank, micro_batch))
        orders.append(order)
    return request.finish(orders)


def _forwards(order: Order, backwards: int) -> int:
    return len(order) - backwards


def backwards_of_units(request: PipelineRequest) -> tuple[list[int], list[int]]:
    """Micro-batches in order of their backwards, with the number of forwards that each needs."""
    backwards: list[int] = []
    reach: list[int] = []
    for first, stop in request.units.tolist():
        backwards += range(stop - 1, first - 1, -1)
        reach += [stop] * (stop - first)
    return backwards, reach


@remembered
def interleaved(request: PipelineRequest) -> PipelineSchedule:
    """1F1B over several stages per rank."""
    request.need_whole_documents()
    orders: list[Order] = []
    ahead_of_last = (request.chunks - 1) * largest_round(request)
    for rank in range(request.ranks):
        warm_up = ahead_of_last + 2 * (request.ranks - 1 - rank)
        if request.chunks == 1:
            warm_up = request.ranks - 1 - rank
        orders.append(alternate(request, rank, warm_up, B))
    return request.finish(orders)


def alternate(request: PipelineRequest, rank: int, warm_up: int, backward: int) -> Order:
    """Run ``warm_up`` forwards, then alternate forward and backward, in rounds over the stages."""
    forwards = rounds(request, rank)
    mirrored = {s: request.stages - request.ranks + 2 * rank - s for s, _ in forwards}
    backwards = [(backward, mirrored[s], m) for s, m in forwards]
    warm_up = min(warm_up, len(forwards))
    order: Order = [(F, *each) for each in forwards[:warm_up]]
    for at, each in enumerate(backwards):
        order += [(F, *ahead) for ahead in forwards[warm_up + at : warm_up + at + 1]]
        order.append(each)
    return order


def rounds(request: PipelineRequest, rank: int) -> list[tuple[int, int]]:
    """A rank's (stage, micro-batch) pairs, one round of micro-batches at a time."""
    pairs = []
    count = max(request.micro_batches // request.ranks, 1)
    first = 0
    for left in range(count, 0, -1):
        stop = first + -(-(request.micro_batches - first) // left)
        for stage in range(rank, request.stages, request.ranks):
            pairs += [(stage, m) for m in range(first, stop)]
        first = stop
    return pairs


def largest_round(request: PipelineRequest) -> int:
    """Micro-batches in the first and largest round."""
    return -(-request.micro_batches // max(request.micro_batches // request.ranks, 1))
