"""Rows of experts on ranks as a picture: what every rank computes, under each policy.

What it decides
    A panel for each policy, a bar for each rank. The dark part of a bar is rows that experts of
    this rank get from here or elsewhere; the bright part is rows of copies. A solid line is the
    mean, which no plan can beat; a dashed one is the lowest that the slots allow, where it is
    higher.

Kept true (tests/unit/dash/test_expert_plot.py)
    Bars are the rows that ranks compute; the same schedules give the same bytes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from equipoise.balance.expert.compare import ExpertScore
from equipoise.balance.expert.trace import TraceScore
from equipoise.base.arrays import Ints
from equipoise.schedule.expert.schedule import ExpertSchedule, add_by

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _SOFT, _PALE = "#1d2733", "#5b616b", "#e7ebef"
_OWN, _COPY = "#0072b2", "#e69f00"
_LINES = ("#5b616b", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#1d2733")
_WIDE_IN, _HIGH_IN = 3.1, 2.9
_ACROSS = 4


def plot_experts(file: Path, scores: Sequence[ExpertScore], title: str) -> None:
    """Draw schedules side by side, on one scale.

    Args:
        file: Where to; the ending says whether PNG, SVG or PDF.
        scores: One for each policy.
        title: What routers chose, and for whom.
    """
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "equipoise"  # the same picture, the same file
    from matplotlib import pyplot

    across = min(_ACROSS, len(scores))
    down = -(-len(scores) // across)
    size = max(5.2, _WIDE_IN * across), _HIGH_IN * down + 0.6
    figure, axes = pyplot.subplots(
        down, across, figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(scores) :]:
        axis.set_visible(False)
    for axis, score in zip(axes.flat, scores, strict=False):
        _draw(axis, score)
    axes[0, 0].set_ylabel("rows computed")
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=_INK)
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def plot_trace(file: Path, scores: Sequence[TraceScore], steps: Sequence[int], title: str) -> None:
    """Draw each policy's max/mean over a run's steps, the mean of its layers.

    Args:
        file: Where to; the ending says whether PNG, SVG or PDF.
        scores: One for each policy, of the same requests.
        steps: Those requests' steps; each has as many requests, one for each layer.
        title: Whose loads, and for whom.
    """
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "equipoise"
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8.0, 3.6), layout="constrained")
    for score, colour in zip(scores, _LINES, strict=False):
        skews = np.array(score.skews).reshape(len(steps), -1).mean(axis=1)
        style = "--" if score.policy == "auto" else "-"
        axis.plot(steps, skews, style, color=colour, linewidth=1.4, label=score.policy)
    axis.set_xlabel("step", fontsize=9)
    axis.set_ylabel("max/mean rows of a rank", fontsize=9)
    axis.set_ylim(bottom=0.98)
    axis.tick_params(labelsize=8)
    axis.grid(visible=True, axis="y", color=_PALE)
    axis.legend(frameon=False, fontsize=8, ncols=3)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=_INK)
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def own_and_copied(schedule: ExpertSchedule) -> tuple[Ints, Ints]:
    """Rows that each rank computes with its own experts and with copies, int64 [ranks] each."""
    places, is_copy, loads = schedule.places, schedule.is_copy, schedule.loads
    own, copied = (
        add_by(places[mask, 1], loads[mask], schedule.ranks) for mask in (~is_copy, is_copy)
    )
    return own, copied


def _draw(axis: "Axes", score: ExpertScore) -> None:
    schedule = score.schedule
    own, copied = own_and_copied(schedule)
    at = np.arange(schedule.ranks)
    axis.bar(at, own, width=0.8, color=_OWN, label="own experts")
    axis.bar(at, copied, width=0.8, bottom=own, color=_COPY, label="copies")
    mean = float(schedule.computed.mean())
    axis.axhline(mean, color=_INK, linewidth=1, label="mean")
    if score.lowest_rows > 1.01 * mean:
        axis.axhline(score.lowest_rows, color=_SOFT, linewidth=1, linestyle="--", label="bound")
    copies = f"{schedule.copies} copies" if schedule.copies else "no copies"
    axis.set_title(
        f"{schedule.policy}: max/mean {schedule.skew:.2f}, {copies}", fontsize=9, loc="left"
    )
    axis.set_xlabel("rank", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(visible=True, axis="y", color=_PALE)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
