"""Partial and reordered paths: each micro-batch leaves some stages out. Not the same model.

Why
    A residual network tolerates that a micro-batch skips some layers. The step gets shorter by
    as much as is skipped, and micro-batches can go around a busy stage. What is learned differs,
    so these schedules are marked lossy, and ``check_pipeline`` refuses them unless the caller
    allows it.

What it decides
    ``skip-partial``     every micro-batch visits the first stage (embedding) and the last
                         (head). Of the stages between, each leaves out a run of equal length,
                         which moves on, or back, from one micro-batch to the next, so that
                         these stages' visits differ by at most one.
    ``skip-reordered``   the same stages, but a micro-batch may swap two neighbouring ones if
                         the second is free sooner than the first.

    Both are then scheduled greedily with split backwards, within the memory bound; a rank does
    one thing at a time, so two micro-batches never collide on a stage.

Kept true (tests/unit/schedule/pipeline/test_skip.py, by Hypothesis)
    Schedules are conflict-free for any prices; visits are even; if first and last stage are
    light, the makespan is at most the kept share of the full 1F1B's, and of the full zb-h1's
    within 1%.

Sources
    SkipPipe, arXiv:2502.19913: partial paths with the first stage kept, swaps of neighbours.
    Its conflict-based search over heterogeneous nodes is replaced by replay.
"""

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.schedule.pipeline.auto import default_bound
from equipoise.schedule.pipeline.greedy import Greedy, Step, Taste
from equipoise.schedule.pipeline.replay import replay_pipeline
from equipoise.schedule.pipeline.request import PipelineRequest
from equipoise.schedule.pipeline.schedule import PipelineSchedule, place_in_loop


def skip_partial(request: PipelineRequest) -> PipelineSchedule:
    """Let every micro-batch leave out a run of stages."""
    schedules = [_schedule(request, _partial_paths(request, way)) for way in (1, -1)]
    return _shortest(request, schedules)


def skip_reordered(request: PipelineRequest) -> PipelineSchedule:
    """``skip_partial`` with swaps of neighbouring stages; never slower than without."""
    in_order = skip_partial(request)
    swapped = _schedule(request, _reorder(request, in_order.paths))
    return _shortest(request, [in_order, swapped])


def _shortest(request: PipelineRequest, schedules: list[PipelineSchedule]) -> PipelineSchedule:
    return min(schedules, key=lambda each: replay_pipeline(each, request.prices).makespan_ns)


def _schedule(request: PipelineRequest, paths: Ints) -> PipelineSchedule:
    placed = place_in_loop(request.ranks, request.stages)
    bound = default_bound(request, placed) if request.most_held is None else request.most_held
    step = Step(request.prices, placed, paths, request.units, bound.tolist())
    tastes = (Taste(in_turn=each, patient=each) for each in (False, True))
    return _shortest(
        request, [request.finish(Greedy(step, each).run(), paths=paths) for each in tastes]
    )


def _partial_paths(request: PipelineRequest, way: int) -> Ints:
    """Paths, int64 [micro-batches, stages kept]; left-out runs move on (1) or back (-1)."""
    request.need_whole_documents()
    between = request.stages - 2
    if not 0.0 <= request.skip < 1.0:
        raise LayoutError(
            f"{request.strategy} has skip = {request.skip:g}. Give a share of 0 or more and "
            f"below 1."
        )
    left_out = round(request.skip * max(between, 0))
    if not left_out and request.skip:
        raise LayoutError(
            f"skip = {request.skip:g} of the {max(between, 0)} stages between the first and the "
            f"last skips none. Give {request.strategy} more stages or a larger share."
        )
    paths = np.empty((request.micro_batches, request.stages - left_out), dtype=np.int64)
    for m in range(request.micro_batches):
        run = range(m * left_out, (m + 1) * left_out)
        skipped = {1 + (at if way > 0 else -1 - at) % between for at in run}
        paths[m] = [stage for stage in range(request.stages) if stage not in skipped]
    return paths


def _reorder(request: PipelineRequest, paths: Ints) -> Ints:
    """Replay the work in order, and swap neighbours where the second is free sooner."""
    work = request.prices.of_ops()
    each = work[0] + work[1]
    placed = place_in_loop(request.ranks, request.stages).tolist()
    free = [0] * request.ranks
    swapped = paths.copy()
    for m in range(request.micro_batches):
        row, time, was_swapped = swapped[m], 0, False
        for at in range(len(row)):
            may_swap = 0 < at < len(row) - 2 and not was_swapped
            here = free[placed[row[at]]]
            was_swapped = may_swap and here > time and free[placed[row[at + 1]]] < here
            if was_swapped:
                row[at], row[at + 1] = int(row[at + 1]), int(row[at])
            rank = placed[row[at]]
            begin = max(time, free[rank])
            time = begin + int(work[0][row[at], m])
            free[rank] = begin + int(each[row[at], m])
    return swapped
