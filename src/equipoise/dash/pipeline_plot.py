"""A pipeline's step as a picture of ranks and time, and as a trace that Perfetto opens.

Why
    A picture shows a bubble at once; a table never does. A predicted and a measured step drawn
    on one axis show where they part.

What it decides
    Forwards in one colour, gradients of inputs in another, gradients of weights in a third;
    whole backwards in the second, darker. The later a rank's stage, the darker. Waiting is
    left white, and so is an edge around what is wide enough for one. Micro-batches are numbered
    where there is room.

    The trace is Chrome's JSON: one process a timeline, one thread a rank, one complete event
    an instruction, times in microseconds; arrows follow messages between ranks.

Kept true (tests/unit/dash/test_pipeline_plot.py)
    A trace has every instruction with its time; a picture has a rectangle for each, and the same
    timelines give the same bytes.

Sources
    Trace Event Format, "JSON Object Format" and "Flow Events" (Chromium project).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.schedule.pipeline.instruction import Op
from equipoise.schedule.pipeline.messages import list_messages
from equipoise.schedule.pipeline.replay import PipelineTimeline
from equipoise.schedule.pipeline.schedule import PipelineSchedule

_INK, _PALE = "#1d2733", "#e7ebef"

_COLOURS = {
    Op.FORWARD: ("#cfe0f1", "#9db8d6", "#7098c4", "#4c7aae"),
    Op.BACKWARD: ("#e59a86", "#d67a62", "#c8553d", "#a8412b"),
    Op.BACKWARD_INPUT: ("#f6d3c8", "#efb9a9", "#e59a86", "#d67a62"),
    Op.BACKWARD_WEIGHT: ("#d9e6c8", "#bcd4a0", "#9bbf77", "#79a653"),
}
"""Colours of each operation, from a rank's first stage to its fourth."""

_NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "gradient of the input",
    Op.BACKWARD_WEIGHT: "gradient of the weights",
}

_LEAST_WIDTH = 0.0075
"""Share of the picture's width that a rectangle needs for each digit."""

_LEAST_EDGE = 0.004
"""Likewise for a white edge, which takes a large part of a narrower bar and looks like waiting."""


def plot_pipeline(file: Path, timelines: Sequence[PipelineTimeline]) -> None:
    """Draw steps below one another on one axis of time.

    Args:
        file: Where to; the ending says whether PNG, SVG or PDF.
        timelines: Steps to draw, as ``replay_pipeline`` predicts them or as a run measured them.
    """
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "equipoise"  # the same picture, the same file
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    top = max((each.makespan_ns for each in timelines), default=0) or 1
    unit_ns, unit = _unit(top)
    heights = [max(each.ranks, 1) for each in timelines]
    figure, axes = pyplot.subplots(
        len(timelines),
        1,
        figsize=(13, 0.34 * sum(heights) + 0.75 * len(timelines) + 0.6),
        sharex=True,
        squeeze=False,
        height_ratios=heights,
    )
    for axis, timeline in zip(axes[:, 0], timelines, strict=True):
        _draw(axis, timeline, (unit_ns, unit), top)
    axes[-1, 0].set_xlabel(f"time [{unit}]", fontsize=9, color=_INK)
    ops = {op for each in timelines for op in np.unique(each.op).tolist()}
    used = [op for op in _COLOURS if op in ops]
    patches = [Rectangle((0, 0), 1, 1, color=_COLOURS[op][1]) for op in used]
    figure.legend(
        patches,
        [_NAMES[op] for op in used],
        loc="upper right",
        ncols=4,
        frameon=False,
        fontsize=9,
        borderaxespad=0.4,
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.25 / figure.get_figheight()))
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def _unit(top_ns: int) -> tuple[float, str]:
    """Unit of the time axis."""
    for unit_ns, name in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if top_ns >= 3 * unit_ns:
            return unit_ns, name
    return 1.0, "ns"


def _draw(
    axis: Any, timeline: PipelineTimeline, counted_in: tuple[float, str], top_ns: int
) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    unit_ns, unit = counted_in
    zero = int(timeline.begin_ns.min(initial=np.iinfo(np.int64).max)) if len(timeline.rank) else 0
    chunk = _chunks(timeline)
    patches, colours, edges = [], [], []
    for at in range(len(timeline.rank)):
        begin = (int(timeline.begin_ns[at]) - zero) / unit_ns
        width = int(timeline.end_ns[at] - timeline.begin_ns[at]) / unit_ns
        rank = int(timeline.rank[at])
        patches.append(Rectangle((begin, rank - 0.45), width, 0.9))
        edges.append(0.4 if width * unit_ns >= _LEAST_EDGE * top_ns else 0.0)
        colours.append(_COLOURS[Op(int(timeline.op[at]))][min(int(chunk[at]), 3)])
        number = str(int(timeline.micro_batch[at]))
        if width * unit_ns >= _LEAST_WIDTH * len(number) * top_ns:
            axis.text(
                begin + width / 2,
                rank,
                number,
                ha="center",
                va="center_baseline",
                fontsize=6.5,
                color=_INK,
            )
    axis.add_collection(
        PatchCollection(patches, facecolors=colours, edgecolors="white", linewidths=edges)
    )
    axis.set_xlim(0, top_ns / unit_ns)
    axis.set_ylim(timeline.ranks - 0.4, -0.6)
    axis.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    axis.set_title(
        f"{timeline.name}   {timeline.makespan_ns / unit_ns:.4g} {unit}, "
        f"{100 * timeline.bubble_rate:.1f}% bubble",
        fontsize=10,
        loc="left",
        color=_INK,
    )
    axis.tick_params(length=0, labelsize=8, colors=_INK)
    axis.set_facecolor("white")
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(side == "bottom")
        axis.spines[side].set_color(_PALE)


def _chunks(timeline: PipelineTimeline) -> np.ndarray:
    """Which of its rank's stages each instruction belongs to, from 0; 1 for an only stage."""
    chunk = np.zeros(len(timeline.rank), dtype=np.int64)
    for rank in range(timeline.ranks):
        mine = timeline.rank == rank
        chunk[mine] = np.unique(timeline.stage[mine], return_inverse=True)[1]
    return chunk if chunk.any() else chunk + 1


def trace_events(
    timelines: Sequence[PipelineTimeline], schedule: PipelineSchedule | None = None
) -> list[dict[str, Any]]:
    """Trace events of steps, each a process of its own.

    Args:
        timelines: What happened, or will.
        schedule: Draws its messages as arrows, if given; timelines have its instructions in
            its order.
    """
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        events.append(_name("process_name", process, 0, timeline.name))
        events += [
            _name("thread_name", process, rank, f"rank {rank}") for rank in range(timeline.ranks)
        ]
        rows = zip(
            timeline.rank.tolist(),
            timeline.op.tolist(),
            timeline.stage.tolist(),
            timeline.micro_batch.tolist(),
            timeline.begin_ns.tolist(),
            timeline.end_ns.tolist(),
            strict=True,
        )
        events += [
            {
                "ph": "X",
                "name": f"{stage}{Op(op).letter}{micro_batch}",
                "cat": Op(op).words,
                "pid": process,
                "tid": rank,
                "ts": begin / 1e3,
                "dur": (end - begin) / 1e3,
                "args": {"stage": stage, "micro_batch": micro_batch},
            }
            for rank, op, stage, micro_batch, begin, end in rows
        ]
        if schedule is not None:
            events += _arrows(timeline, process, schedule)
    return events


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _arrows(
    timeline: PipelineTimeline, process: int, schedule: PipelineSchedule
) -> list[dict[str, Any]]:
    starts = np.concatenate(([0], np.cumsum([len(order) for order in schedule.orders])))
    arrows = []
    for number, message in enumerate(list_messages(schedule)):
        sent = starts[message.source] + message.sent_at
        needed = starts[message.target] + message.needed_at
        common = {"cat": "message", "name": message.carries, "id": f"{process}.{number}"}
        for phase, at, rank, time in (
            ("s", sent, message.source, timeline.end_ns),
            ("f", needed, message.target, timeline.begin_ns),
        ):
            end = {"bp": "e"} if phase == "f" else {}
            arrows.append(
                {"ph": phase, "pid": process, "tid": rank, "ts": int(time[at]) / 1e3} | common | end
            )
    return arrows


def write_trace(
    file: Path,
    timelines: Sequence[PipelineTimeline],
    schedule: PipelineSchedule | None = None,
) -> None:
    """Write a trace that https://ui.perfetto.dev and chrome://tracing open.

    Args:
        file: Where to.
        timelines: Predicted, measured, or both side by side.
        schedule: As for ``trace_events``.
    """
    whole = {"displayTimeUnit": "ms", "traceEvents": trace_events(timelines, schedule)}
    file.write_text(json.dumps(whole), encoding="utf-8")
