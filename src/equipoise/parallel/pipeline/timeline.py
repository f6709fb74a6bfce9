"""The measured times of a pipeline step: all ranks' instructions on one time axis, and in journals.

Why
    A schedule's replay is a prediction. The same table with measured times goes through the same
    drawing and bubble rate, and shows where the prediction failed.

What it decides
    Times are read from each rank's own clock. Ranks of one machine share it to a microsecond;
    between machines times differ as the clocks do.

Kept true (tests/unit/parallel/test_pipeline_timeline.py, tests/multi/parallel/test_pipeline.py)
    Rows are those of the schedule, rank by rank in its order; none begins before the rank's
    previous one has ended, or before its inputs exist.
"""

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from equipoise.observe.journal import EventSink
from equipoise.schedule.pipeline.instruction import Op
from equipoise.schedule.pipeline.prices import PipelinePrices
from equipoise.schedule.pipeline.replay import PipelineTimeline


def join_timelines(timelines: Sequence[PipelineTimeline]) -> PipelineTimeline:
    """Join all ranks' timelines into one, in their order, starting at the earliest begin."""
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
    """Every rank's rows; all ranks of the pipeline must call this."""
    rows: list[PipelineTimeline | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, timeline, group=group)
    return join_timelines([each for each in rows if each is not None])


def measured_prices(timelines: Sequence[PipelineTimeline], like: PipelinePrices) -> PipelinePrices:
    """Measured prices: the median of each instruction's times.

    Args:
        timelines: Timelines of all ranks, from steps of the same micro-batches.
        like: Prices for whatever was not measured: hops and activations. Backwards that ran
            whole are divided into halves in the proportion of these prices.
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
        journal: This rank's journal.
        timeline: Its instructions as they ran.
        step: Step of the run.
        predicted: The predicted times of all ranks, starting at 0; each span then has them too.
    """
    columns = ("op", "stage", "micro_batch", "begin_ns", "end_ns")
    ran = np.stack([getattr(timeline, name) for name in columns], axis=1)
    promised: dict[tuple[int, int, int], tuple[int, int]] = {}
    if predicted is not None:
        planned = np.stack([getattr(predicted, name) for name in columns], axis=1)
        promised = {(op, stage, at): (begin, end) for op, stage, at, begin, end in planned.tolist()}
    for op, stage, micro_batch, begin, end in ran.tolist():
        promise = {}
        if (op, stage, micro_batch) in promised:
            from_ns, to_ns = promised[op, stage, micro_batch]
            promise = {
                "predicted_begin_s": from_ns / 1e9,
                "predicted_s": (to_ns - from_ns) / 1e9,
            }
        journal.write(
            "span",
            Op(op).span,
            t=begin / 1e9,
            duration_s=(end - begin) / 1e9,
            step=step,
            micro_batch=micro_batch,
            stage=stage,
            **promise,
        )
