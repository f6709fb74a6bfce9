"""A pipeline's step as text: two lines a rank, of micro-batches above and operations below.

What it decides
    A character is a moment, and shows what its rank computes then. Letters are those of a
    schedule's text, F, B, I and W; small ones stand for stages after a rank's first. Lines are
    as wide as the console.
"""

from typing import TYPE_CHECKING

import numpy as np

from equipoise.base.units import format_seconds
from equipoise.schedule.pipeline.instruction import Op
from equipoise.schedule.pipeline.replay import PipelineTimeline

if TYPE_CHECKING:
    from rich.console import Console

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

_STYLES = {"F": "cyan", "B": "red", "I": "magenta", "W": "green"}

_RANKS = 32
"""Ranks that are drawn."""

_WIDEST = 160


def draw_lanes(timeline: PipelineTimeline, width: int) -> list[tuple[str, str]]:
    """Of each rank, its micro-batches and its operations, a character a moment.

    Args:
        timeline: Predicted or measured.
        width: Characters of the whole step, >= 1.

    >>> from equipoise.schedule.pipeline.prices import make_prices
    >>> from equipoise.schedule.pipeline.replay import replay_pipeline
    >>> from equipoise.schedule.pipeline.strategies import write_pipeline
    >>> prices = make_prices(2, 1, 1, stages=2, micro_batches=2)
    >>> step = replay_pipeline(write_pipeline("1f1b", prices, ranks=2), prices)
    >>> for line in draw_lanes(step, step.makespan_ns):
    ...     print(*line)
    0011··00··11 FFFF··BB··BB
    ··00001111·· ··FFBBFFBB··
    """
    first = int(timeline.begin_ns.min(initial=np.iinfo(np.int64).max)) if len(timeline.rank) else 0
    middles = first + (np.arange(width) + 0.5) * timeline.makespan_ns / width
    lanes = []
    for rank in range(timeline.ranks):
        mine = np.flatnonzero((timeline.rank == rank) & (timeline.end_ns > timeline.begin_ns))
        mine = mine[np.argsort(timeline.begin_ns[mine], kind="stable")]
        above, below = np.full(width, "·"), np.full(width, "·")
        if len(mine):
            at = np.searchsorted(timeline.begin_ns[mine], middles, side="right") - 1
            row = mine[np.maximum(at, 0)]
            is_busy = (at >= 0) & (middles < timeline.end_ns[row])
            digits = np.array(list(_DIGITS))[timeline.micro_batch % len(_DIGITS)]
            letters = np.array([op.letter for op in Op])[timeline.op]
            is_later = timeline.stage != timeline.stage[mine].min()
            letters = np.where(is_later, np.char.lower(letters), letters)
            above[is_busy], below[is_busy] = digits[row[is_busy]], letters[row[is_busy]]
        lanes.append(("".join(above.tolist()), "".join(below.tolist())))
    return lanes


def print_lanes(timeline: PipelineTimeline, console: "Console") -> None:
    """Show the step as wide as the console, and what its characters mean."""
    from rich.text import Text

    total = format_seconds(timeline.makespan_ns / 1e9)
    width = max(20, min(console.width, _WIDEST) - 9)
    console.print(f"time     0{total:>{width - 1}}", soft_wrap=True)
    for rank, lane in enumerate(draw_lanes(timeline, width)[:_RANKS]):
        for name, line in zip((f"rank {rank}", ""), lane, strict=True):
            text = Text(f"{name:<9}")
            for letter, style in zip(line, lane[1], strict=True):
                text.append(letter, _STYLES.get(style.upper(), "dim"))
            console.print(text, soft_wrap=True)
    if timeline.ranks > _RANKS:
        console.print(f"and {timeline.ranks - _RANKS} more ranks", style="dim")
    ops = {Op(op) for op in np.unique(timeline.op).tolist()}
    words = ", ".join(f"{op.letter} {op.words}" for op in Op if op in ops)
    small = "; small: a later stage of the rank" if _is_chunked(timeline) else ""
    each_s = timeline.makespan_ns / width / 1e9
    each = format_seconds(each_s) if each_s >= 1e-3 else f"{1e6 * each_s:.1f} us"
    console.print(
        f"above: the micro-batch; below: {words}{small}; dots: waiting. A character is "
        f"{each}.{_too_narrow(timeline, width)}",
        style="dim",
    )


def _is_chunked(timeline: PipelineTimeline) -> bool:
    return any(
        len(np.unique(timeline.stage[timeline.rank == rank])) > 1 for rank in range(timeline.ranks)
    )


def _too_narrow(timeline: PipelineTimeline, width: int) -> str:
    takes = timeline.end_ns - timeline.begin_ns
    short = int(((takes > 0) & (takes * width < timeline.makespan_ns)).sum())
    if not short:
        return ""
    return f" {short:,} of {len(takes):,} instructions are shorter; --plot draws them all."
