"""Zero-bubble schedules in a loop: the backward is split, and weight gradients fill the gaps.

What it decides
    ``zb-h1``           1F1B's order of forwards and backwards. Each rank may hold as much as
                        1F1B's first rank, and so delays weight gradients to the end, where it
                        would wait.
    ``zb-h2``           twice the forwards ahead: at equal prices no rank waits between its first
                        and last instruction, and ranks start and end one after the other. It
                        pays if steps follow each other that way; if all ranks begin a step
                        together, it is zb-h1 with more memory.
    ``interleaved-zb``  several stages per rank, half the forwards ahead of ``interleaved``.

Kept true (tests/unit/schedule/pipeline/test_strategies.py)
    In-flight activations and bubble rates equal the published ones, to the last digit on 12 rows
    of profiled times.

Sources
    Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2 and tables 5 and 6.
"""

import dataclasses

import numpy as np

from equipoise.schedule.pipeline.fill import fill_weights
from equipoise.schedule.pipeline.instruction import Op
from equipoise.schedule.pipeline.orders import alternate, largest_round
from equipoise.schedule.pipeline.replay import count_in_flight
from equipoise.schedule.pipeline.request import PipelineRequest, remembered
from equipoise.schedule.pipeline.schedule import PipelineSchedule

_INPUT = int(Op.BACKWARD_INPUT)


def zb_h1(request: PipelineRequest) -> PipelineSchedule:
    """1F1B with split backwards, in 1F1B's memory."""
    request.need_chunks(1)
    return _split(request, 0, 1)


def zb_h2(request: PipelineRequest) -> PipelineSchedule:
    """Twice the forwards ahead."""
    request.need_chunks(1)
    return _split(request, 0, 2)


def interleaved_zb(request: PipelineRequest) -> PipelineSchedule:
    """Several stages per rank, with split backwards."""
    return _split(request, (request.chunks - 1) * largest_round(request), 1)


def _split(request: PipelineRequest, ahead: int, factor: int) -> PipelineSchedule:
    request.need_whole_documents()
    behind = range(request.ranks - 1, -1, -1)
    return finish_filled(
        request, lay_split(request, tuple(ahead + factor * each for each in behind))
    )


@remembered
def lay_split(request: PipelineRequest, warm_ups: tuple[int, ...]) -> PipelineSchedule:
    """Alternate forwards and input gradients after each rank's ``warm_ups`` forwards."""
    return request.finish(
        [alternate(request, rank, each, _INPUT) for rank, each in enumerate(warm_ups)]
    )


def finish_filled(
    request: PipelineRequest, bare: PipelineSchedule, *, slack: int = 0
) -> PipelineSchedule:
    """Fill in weight gradients, letting every rank hold what the fullest needs anyway.

    ``slack`` is how much more each rank may hold, in activations of the largest stage.
    """
    sizes = request.prices.activation
    held = count_in_flight(bare, sizes).peak_without_stash
    most = int(held.max(initial=0)) + slack * int(sizes.max(initial=0))
    limits = [most] * request.ranks
    if request.most_held is not None:
        limits = np.maximum(np.minimum(request.most_held, most), held).tolist()
    filled = fill_weights(bare, request.prices, limits)
    return dataclasses.replace(bare, strategy=request.strategy, orders=filled)
