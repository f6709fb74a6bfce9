"""Schedules of attention as pictures: who computes which tile in which round, and when.

What it decides
    Two panels a strategy. Left or above: the plane of queries (down) and keys (across), each
    tile in the colour of the rank that computes it, the paler the later its round; where ranks
    share tiles by heads, their colours alternate in stripes. Right or below: a lane for each
    rank, with what it computes, and under that what it receives, in the colour of the sender,
    as ``price_attention`` replays it.

    Up to eight ranks have the colours of Okabe and Ito, which people with any kind of colour
    vision tell apart; more ranks have steps of one scale from dark to light.

Kept true (tests/unit/dash/test_attention_plot.py)
    A pixel of the plane is coloured where its query reads its key, by a rank that computes it;
    bars of a lane do not overlap, and end with the pass.

Sources
    Colours: Okabe and Ito, Color Universal Design, 2008.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from equipoise.base.units import format_bytes, format_seconds
from equipoise.dash.attention_plane import lane_bars, paint_plane
from equipoise.schedule.attention.price import Replay
from equipoise.schedule.attention.schedule import AttentionSchedule
from equipoise.schedule.attention.score import AssumedMachine, AttentionScore

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_INK, _SOFT, _PALE = "#1d2733", "#5b616b", "#e7ebef"

_OKABE_ITO = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#000000",
)

_PIXELS = 420
"""A large plane's side; a small one has half as many."""

_PALEST = 0.62
"""How much of the last round's colour is white."""

_ARROWS = 60
"""Up to this many messages of a pass, each also has a line to its sender."""

_LANE_IN, _LANES = 0.34, 16
"""Height of a lane, and the number of lanes above which they get lower."""

_NOTES = (
    "queries down, keys across",
    "edges: the rank that holds them",
    "inside: the rank that computes",
    "paler: later rounds",
)

_TEXT: dict[str, Any] = {"fontsize": 9.5, "linespacing": 1.3}
_HEAD: dict[str, Any] = {"color": _INK, "va": "top", "weight": "bold"}
_LINE_IN = 0.18
_WIDE = 74
"""Height of a line of text, and its longest."""

_LABELLED = 0.06
"""Pieces of at least this share of the pack are labelled with their rank."""


def plot_attention(
    file: Path, scores: Sequence[AttentionScore], machine: AssumedMachine, origin: str
) -> None:
    """Draw strategies; one of them large, several one below the other.

    Args:
        file: Where to; the ending says whether PNG, SVG or PDF.
        scores: The strategies.
        machine: The machine that their times assume.
        origin: Where the documents come from.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    mpl.rcParams["svg.hashsalt"] = "equipoise"  # the same picture, the same file
    lanes_in = _LANE_IN * min(scores[0].schedule.ranks, _LANES) + 0.5
    about = _wrap(_about(scores[0], origin), f"simulated: {machine}", "; ".join(_NOTES))
    about_in = _LINE_IN * (about.count("\n") + 1)
    if len(scores) == 1:
        figure = pyplot.figure(figsize=(6.0, 5.65 + lanes_in + about_in))
        _draw_large(figure, scores[0], about, (about_in, lanes_in))
    else:
        head_in = about_in + 0.3
        row_in = lanes_in + 1.2
        heights = (head_in, *(row_in for _ in scores))
        figure = pyplot.figure(figsize=(6.4, sum(heights)))
        made = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
        head, *rows = made[:, 0].tolist()
        at = 1 - 0.1 / head_in
        head.text(0.02, at, about, color=_SOFT, va="top", **_TEXT)
        longest_ns = max(score.price.total_ns for score in scores)
        for row, score in zip(rows, scores, strict=True):
            _draw_row(row, score, longest_ns, row_in)
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def _draw_large(
    figure: "Figure", score: AttentionScore, about: str, heights_in: tuple[float, float]
) -> None:
    about_in, lanes_in = heights_in
    inch = 1 / float(figure.get_figheight())
    plane, lanes = figure.subplots(2, 1, height_ratios=(4.3, lanes_in))
    top = 1 - (about_in + 0.6) * inch
    figure.subplots_adjust(left=0.12, right=0.97, top=top, bottom=0.95 * inch, hspace=0.2)
    figure.text(0.02, 1 - 0.1 * inch, _title(score), **_HEAD, fontsize=14)
    figure.text(0.02, 1 - 0.4 * inch, about, color=_SOFT, va="top", **_TEXT)
    figure.text(0.02, 0.12 * inch, _caption(score), color=_INK, **_TEXT)
    _draw_plane(plane, score.schedule, _PIXELS)
    _draw_lanes(lanes, score, score.price.total_ns)


def _draw_row(
    figure: "SubFigure", score: AttentionScore, longest_ns: float, high_in: float
) -> None:
    plane, lanes = figure.subplots(1, 2, width_ratios=(1, 2.2))
    top, bottom = 1 - 0.75 / high_in, 0.57 / high_in
    figure.subplots_adjust(left=0.045, right=0.97, top=top, bottom=bottom, wspace=0.24)
    figure.text(0.02, 1.0, _title(score), **_HEAD, fontsize=12)
    figure.text(0.02, 1 - 0.21 / high_in, _caption(score), color=_INK, va="top", **_TEXT)
    _draw_plane(plane, score.schedule, _PIXELS // 2)
    _draw_lanes(lanes, score, longest_ns)


def rank_colors(ranks: int) -> npt.NDArray[np.float64]:
    """A colour for each rank, float64 [ranks, 3]."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    if ranks <= len(_OKABE_ITO):
        return np.array([to_rgb(name) for name in _OKABE_ITO[:ranks]])
    colors: npt.NDArray[np.float64] = colormaps["cividis"](np.linspace(0, 0.95, ranks))[:, :3]
    return colors


def _fade(
    colors: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Colours, paler the later: ``shares`` is 0 for the first round and 1 for the last."""
    faded: npt.NDArray[np.float64] = colors + (1 - colors) * (_PALEST * shares)[..., None]
    return faded


def _draw_plane(axis: "Axes", schedule: AttentionSchedule, pixels: int) -> None:
    colors = rank_colors(schedule.ranks)
    painted = paint_plane(schedule, pixels)
    is_read = painted[..., 0] >= 0
    picture = np.ones((pixels, pixels, 3))
    first, last = _rounds_with_tiles(schedule)
    rank, at = painted[is_read].T
    picture[is_read] = _fade(colors[rank], (at - first) / max(1, last - first))
    axis.imshow(picture, extent=(0, 1, 1, 0), interpolation="nearest")
    lengths = schedule.doc_tokens
    total = max(1, schedule.tokens)
    begins = np.cumsum(lengths) - lengths
    for home_of, home in enumerate(schedule.home):
        for document, start, stop in home.tolist():
            low, size = float(begins[document] + start) / total, (stop - start) / total
            axis.broken_barh([(-0.05, 0.033)], (low, size), color=colors[home_of], linewidth=0)
            axis.broken_barh([(low, size)], (1.017, 0.033), color=colors[home_of], linewidth=0)
            if size > _LABELLED:
                middle, name = low + size / 2, str(home_of)
                axis.text(-0.065, middle, name, ha="right", va="center", fontsize=9, color=_SOFT)
                axis.text(middle, 1.06, name, ha="center", va="top", fontsize=9, color=_SOFT)
    axis.set(xticks=[], yticks=[], xlim=(-0.05, 1), ylim=(1.05, 0))
    for side in axis.spines.values():
        side.set_visible(False)


def _rounds_with_tiles(schedule: AttentionSchedule) -> tuple[int, int]:
    """The first and the last round in which anything is computed."""
    busy = [at for _, at, each in schedule if len(each.tiles)]
    return min(busy, default=0), max(busy, default=0)


def _draw_lanes(axis: "Axes", score: AttentionScore, longest_ns: float) -> None:
    price, schedule = score.price, score.schedule
    colors = rank_colors(schedule.ranks)
    first, last = _rounds_with_tiles(schedule)
    rounds = price.forward.begins_ns.shape[1]
    begin = 0.0
    for replay, name in ((price.forward, "forward"), (price.backward, "backward")):
        end = float(replay.ends_ns.max(initial=0.0))
        for rank in range(schedule.ranks):
            axis.broken_barh([(begin, end)], (rank + 0.06, 0.88), color=_PALE, linewidth=0)
            for at, (start, stop) in enumerate(lane_bars(replay, rank).tolist()):
                index = at if replay is price.forward else rounds - 1 - at
                share = np.array((index - first) / max(1, last - first))
                color = _fade(colors[rank], share)
                span = [(begin + start, stop - start)]
                if stop > start:
                    axis.broken_barh(span, (rank + 0.1, 0.5), color=color, linewidth=0)
        for flight in replay.flights:
            span = [(begin + flight.start_ns, flight.end_ns - flight.start_ns)]
            axis.broken_barh(
                span,
                (flight.target + 0.66, 0.22),
                facecolor=colors[flight.source],
                edgecolor="#ffffff",
                linewidth=0.4,
            )
        if len(replay.flights) <= _ARROWS:
            _draw_arrows(axis, replay, begin)
        axis.text(begin, -0.12, name, fontsize=9, color=_SOFT)
        begin += end
        axis.axvline(begin, color=_INK, linewidth=0.8)
    axis.set(xlim=(0, max(longest_ns, 1.0)), ylim=(schedule.ranks, -0.05))
    step = max(1, -(-schedule.ranks // 16))
    named = range(0, schedule.ranks, step)
    axis.set_yticks([rank + 0.5 for rank in named], [f"rank {rank}" for rank in named])
    axis.xaxis.set_major_formatter(lambda ns, _: f"{ns / 1e6:g}")
    axis.tick_params(length=0, labelsize=9, colors=_SOFT)
    axis.set_xlabel("ms; upper bars: tiles, lower: messages received", fontsize=9, color=_SOFT)
    for side in axis.spines.values():
        side.set_visible(False)


def _draw_arrows(axis: "Axes", replay: Replay, begin_ns: float) -> None:
    """A thin line, with a dot at the sender, down or up to the message at its receiver."""
    for flight in replay.flights:
        is_down = flight.source < flight.target
        there = flight.target + (0.66 if is_down else 0.88)
        axis.plot(
            (begin_ns + flight.start_ns, begin_ns + flight.start_ns),
            (flight.source + (0.94 if is_down else 0.06), there),
            color=_INK,
            linewidth=0.5,
            alpha=0.5,
            marker="o",
            markersize=1.6,
            markevery=(0, 2),
        )


def _wrap(*paragraphs: str) -> str:
    return "\n".join(textwrap.fill(each, _WIDE) for each in paragraphs)


def _title(score: AttentionScore) -> str:
    return f"{score.name}, {score.sharding}"


def _about(score: AttentionScore, origin: str) -> str:
    schedule = score.schedule
    masks = {str(mask) for mask in schedule.masks} or {"causal"}
    mask = masks.pop() if len(masks) == 1 else "several"
    return (
        f"{schedule.tokens:,} tokens of {len(schedule.doc_tokens):,} documents ({origin}) over "
        f"{schedule.ranks} ranks; one layer, {schedule.heads} query and {schedule.kv_heads} "
        f"key/value heads of width {score.wire.head_width}; mask: {mask}"
    )


def _caption(score: AttentionScore) -> str:
    counts = score.counts
    return (
        f"sent {format_bytes(int(counts.forward_bytes.sum()))} forward, "
        f"{format_bytes(int(counts.backward_bytes.sum()))} backward, {score.messages:,} messages; "
        f"skew of pairs {counts.pair_skew:.3f};\n"
        f"predicted {format_seconds(score.price.total_ns / 1e9)}, with "
        f"{format_seconds(score.exposed_ns / 1e9)} of exposed communication"
    )
