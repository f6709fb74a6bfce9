"""What a pipeline's step really took: every rank's instructions on one axis, and in journals.

Why
    A schedule's replay is a promise. The same table filled in with measured times is drawn by
    the same pictures, has the same bubble rate, and shows where the promise was not kept.

What it decides
    Times are those of each rank's own clock, which ranks of one machine share to a microsecond;
    between machines they differ by what their clocks do.

Kept true (tests/unit/parallel/test_pipeline_timeline.py, tests/multi/parallel/test_pipeline.py)
    Rows are those of the schedule, rank by rank in its order; none begins before the rank's
    last has ended, or before what it needs was made.
"""

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from equipoise.observe.journal import EventSink
from equipoise.schedule.pipeline.instruction import Op
from equipoise.schedule.pipeline.prices import PipelinePrices
from equipoise.schedule.pipeline.replay import PipelineTimeline


def join_timelines(timelines: Sequence[PipelineTimeline]) -> PipelineTimeline:
    """Timelines of all ranks as one, in their order, from the first begin on."""
    columns = ("rank", "op", "stage", "micro_batch", "begin_ns", "end_ns")
    rows = np.stack(
        [np.concatenate([getattr(each, name) for each in timelines]) for name in columns]
    )
    if rows.shape[1]:
        rows[4:] -= rows[4].min()
    return PipelineTimeline(timelines[0].name, timelines[0].ranks, *rows)


def gather_timeline(
    timeline: PipelineTimeline, group: dist.ProcessGroup | None = None
) -> PipelineTimeline:
    """Every rank's rows; every rank of the pipeline calls it."""
    rows: list[PipelineTimeline | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, timeline, group=group)
    return join_timelines([each for each in rows if each is not None])


def measured_prices(timelines: Sequence[PipelineTimeline], like: PipelinePrices) -> PipelinePrices:
    """Prices that these steps took: the median of each instruction's times.

    Args:
        timelines: Of all ranks, of steps of the same micro-batches.
        like: Where nothing was measured, these stand: hops, activations, and the halves of
            backwards that ran whole, each with its share of what the whole took.
    """
    tables = like.of_ops().astype(np.float64)
    input_share = like.input_ns / np.maximum(like.input_ns + like.weight_ns, 1)
    takes = np.full((len(timelines), *tables.shape), np.nan)
    for at, each in enumerate(timelines):
        takes[at, each.op, each.stage, each.micro_batch] = each.end_ns - each.begin_ns
    known = np.asarray(~np.isnan(takes).all(axis=0))
    tables[known] = np.nanmedian(takes[:, known], axis=0)
    ops = np.rint(tables).astype(np.int64)
    first_half = np.rint(tables[Op.BACKWARD] * input_share).astype(np.int64)
    whole = known[Op.BACKWARD]
    inputs = np.where(whole, first_half, ops[Op.BACKWARD_INPUT])
    weights = np.where(whole, ops[Op.BACKWARD] - first_half, ops[Op.BACKWARD_WEIGHT])
    forward = ops[Op.FORWARD]
    return PipelinePrices(forward, inputs, weights, like.hop_ns, like.activation)


def write_spans(
    journal: EventSink,
    timeline: PipelineTimeline,
    *,
    step: int,
    predicted: PipelineTimeline | None = None,
) -> None:
    """Write a rank's own instructions to its journal, a span each.

    Args:
        journal: Of this rank.
        timeline: Its instructions as they ran.
        step: Of the run.
        predicted: When they were to run, on all ranks, from 0 on; a span then also says that.
    """
    columns = ("op", "stage", "micro_batch", "begin_ns", "end_ns")
    ran = np.stack([getattr(timeline, name) for name in columns], axis=1)
    promised: dict[tuple[int, int, int], tuple[int, int]] = {}
    if predicted is not None:
        planned = np.stack([getattr(predicted, name) for name in columns], axis=1)
        promised = {(op, stage, at): (begin, end) for op, stage, at, begin, end in planned.tolist()}
    for op, stage, micro_batch, begin, end in ran.tolist():
        said = {}
        if (op, stage, micro_batch) in promised:
            from_ns, to_ns = promised[op, stage, micro_batch]
            said = {"predicted_begin_s": from_ns / 1e9, "predicted_s": (to_ns - from_ns) / 1e9}
        journal.write(
            "span",
            Op(op).span,
            t=begin / 1e9,
            duration_s=(end - begin) / 1e9,
            step=step,
            micro_batch=micro_batch,
            stage=stage,
            **said,
        )
