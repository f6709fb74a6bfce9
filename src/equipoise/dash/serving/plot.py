"""A served trace as a picture: which share of requests was how fast, one way beside another.

What it decides
    Two panels: time to first token, and time per token. A line rises from the fastest request to
    the slowest; to the left is better. A line is a tenant's requests, or all requests of one way to
    serve them. Objectives for all tenants are dashed.

Kept true (tests/unit/dash/test_serving_plot.py)
    A picture has a line for each name in each panel; the same answers give the same bytes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.base.shown import shorten
from equipoise.sim.serve.answer import Objective, ServingAnswer
from equipoise.sim.serve.record import RequestRecord

_INK, _PALE = "#1d2733", "#e7ebef"
_COLOURS = ("#4c7aae", "#c8553d", "#79a653", "#8a6bb1", "#b58a2c", "#5c6b7a")
_MOST = len(_COLOURS)


def plot_tenants(file: Path, answer: ServingAnswer) -> None:
    """Draw each tenant's requests; the tenants with most, where there are many.

    Args:
        file: Where to; the ending says whether PNG, SVG or PDF.
        answer: A served trace.
    """
    tenants: dict[str, list[RequestRecord]] = {}
    for each in answer.run.requests:
        tenants.setdefault(each.traced.tenant or "(none)", []).append(each)
    names = sorted(tenants, key=lambda name: (-len(tenants[name]), name))[:_MOST]
    plot_shares(file, {name: tenants[name] for name in names}, answer.objectives.get(""))


def plot_shares(
    file: Path, groups: Mapping[str, Sequence[RequestRecord]], objective: Objective | None
) -> None:
    """Draw groups of requests, each a line.

    Args:
        file: Where to; the ending says whether PNG, SVG or PDF.
        groups: Requests by name.
        objective: What is dashed; None for nothing.
    """
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "equipoise"  # the same picture, the same file
    from matplotlib import pyplot
    from matplotlib.ticker import LogFormatter, StrMethodFormatter

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.6), sharey=True)
    for name, colour in zip(groups, _COLOURS, strict=False):
        requests = groups[name]
        _line(axes[0], [each.ttft_s for each in requests], name, colour)
        _line(axes[1], [each.tpot_s for each in requests if each.tpot_s], name, colour)
    limits = (None, None) if objective is None else (objective.ttft_s, objective.tpot_s)
    for axis, title, limit in zip(axes, ("first token", "each token after"), limits, strict=True):
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axis.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.5)))
        axis.set_xlabel(f"time to {title} [ms]" if axis is axes[0] else f"time of {title} [ms]")
        axis.grid(visible=True, color=_PALE)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        if limit is not None and limit < float("inf"):
            axis.axvline(1e3 * limit, color=_INK, linestyle="--", linewidth=1)
    axes[0].set_ylabel("share of requests")
    axes[0].set_ylim(0, 1.01)
    axes[1].legend(frameon=False, fontsize=9, loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def _line(axis: Any, seconds: Sequence[float], name: str, colour: str) -> None:
    values = sorted(1e3 * each for each in seconds)
    count = len(values)
    if count:
        shares = [(at + 1) / count for at in range(count)]
        label = _label(name)
        axis.step([values[0], *values], [0.0, *shares], color=colour, label=label, where="post")


def _label(name: str) -> str:
    r"""A name as matplotlib shows it: without formulas, and not left out of the legend.

    >>> _label("a$b$"), _label("_a")
    ('a\\$b\\$', ' _a')
    """
    text = shorten(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
