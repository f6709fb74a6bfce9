"""Embedding tables as a picture: each rank's lookups and exchange, beside other placements."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from equipoise.balance.tables.baseline import NamedLoads
from equipoise.balance.tables.plan import TableAnswer

_LOOKUP, _EXCHANGE, _INK, _PALE = "#9db8d6", "#c8553d", "#1d2733", "#e7ebef"


def plot_tables(file: Path, answer: TableAnswer, beside: Sequence[NamedLoads], origin: str) -> None:
    """Draw every rank's load under the plan and under each other placement, over its mean.

    Args:
        file: Where to; the ending says whether PNG, SVG or PDF.
        answer: The plan.
        beside: Whole tables, placed otherwise.
        origin: Which tables, for the title.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    ranks, panels = answer.plan.ranks, 1 + len(beside)
    figure, axes = pyplot.subplots(
        1, panels, figsize=(3.6 * panels, 3.2), sharey=True, squeeze=False
    )
    mean = float(answer.load_s.mean()) * 1e12 or 1.0
    order = np.argsort(-answer.load_s, kind="stable")
    places, width = np.arange(ranks), 0.82 if ranks <= 32 else 1.0
    first = axes[0][0]
    compute, exchange = answer.compute_ps[order] / mean, answer.exchange_ps[order] / mean
    first.bar(places, compute, width, color=_LOOKUP, label="lookups")
    first.bar(places, exchange, width, bottom=compute, color=_EXCHANGE, label="exchange")
    first.set_title(f"equipoise   {answer.skew:.3f}", fontsize=11, loc="left", color=_INK)
    first.set_ylabel("load / mean of the plan", fontsize=9, color=_INK)
    for axis, each in zip(axes[0][1:], beside, strict=True):
        axis.bar(places, np.sort(each.load_ps)[::-1] / mean, width, color=_INK)
        axis.set_title(f"{each.name}   {each.skew:.3f}", fontsize=9, loc="left", color=_INK)
    for axis in axes[0]:
        axis.axhline(1.0, color=_INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axis.set_xticks([])
        axis.set_xlabel(f"{ranks:,} ranks, busiest first", fontsize=9)
        axis.grid(axis="y", color=_PALE)
        axis.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    first.legend(frameon=False, fontsize=9)
    figure.suptitle(f"Embedding tables: {origin}", fontsize=11, x=0.01, ha="left", color=_INK)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def plot_evenness(
    file: Path, placements: Sequence[tuple[str, Sequence[float]]], origin: str
) -> None:
    """Draw what each placement leaves of evenness: ranks over their mean, busiest first.

    Args:
        file: Where to; the ending says whether PNG, SVG or PDF.
        placements: A name, and each rank's lookups over the mean.
        origin: Whose batches, for the title.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    count = len(placements)
    figure, axes = pyplot.subplots(1, count, figsize=(2.3 * count, 3.0), sharey=True, squeeze=False)
    for axis, (name, loads) in zip(axes[0], placements, strict=True):
        axis.bar(range(len(loads)), loads, 0.82, color=_LOOKUP)
        axis.axhline(1.0, color=_INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axis.set_title(f"{name}\n{loads[0]:.3f}", fontsize=10, loc="left", color=_INK)
        axis.set_xticks([])
        axis.grid(axis="y", color=_PALE)
        axis.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[0][0].set_ylabel("floats looked up / mean", fontsize=9, color=_INK)
    axes[0][0].set_xlabel("ranks, busiest first", fontsize=9)
    figure.suptitle(origin, fontsize=10, x=0.01, ha="left", color=_INK)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
