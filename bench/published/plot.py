"""Draw the residuals of the page "Foresight" from what the benches wrote.

``python -m bench.published.plot docs/images/foresight`` writes each as SVG. One dot is one row, one
line a source; the band is the goal. Figures are narrow, so that a phone can show their letters.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"

INK, PALE, BLUE, RED = "#1d2733", "#dfe6ec", "#2f6690", "#c8553d"
_OPS = {
    "all_gather": BLUE,
    "all_reduce": RED,
    "all_to_all": "#6a994e",
    "reduce_scatter": "#8d6a9f",
}
_WIDTH = 5.4
"""Inches."""
_ROOM = 0.6
"""Height of a line of dots; lines are 1 apart."""
_SOURCES = {
    "dgxc": "NVIDIA's recipes",
    "SC21 table 1": "Megatron-LM 2021, table 1",
    "SC21 table 2": "Megatron-LM 2021, table 2",
    "Megatron January 2021": "Megatron-LM, January 2021",
    "Megatron 2020": "Megatron-LM 2020",
    "Korthikanti table 5": "arXiv:2205.05198 table 5",
    "zero bubble table 4": "arXiv:2401.10241 table 4",
}
"""Names of sources on the page; sources not listed keep their own."""


def read(name: str) -> Any:
    """The JSON that a bench wrote."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def _dots(
    axis: Any, groups: Mapping[str, Sequence[float]], *, band: float, limit: float, said: str
) -> None:
    """A line of dots for each group, first at the top, with its mean error beside it."""
    axis.axvspan(-band, band, color=PALE, linewidth=0)
    axis.axvline(0, color=INK, linewidth=0.8)
    for at, errors in enumerate(groups.values()):
        count = len(errors)
        places = [at - _ROOM / 2 + _ROOM * (i + 0.5) / count for i in range(count)]
        shown = [max(-limit, min(limit, error)) for error in errors]
        axis.plot(shown, places, "o", markersize=3, color=BLUE, alpha=0.6, clip_on=False)
        mean = sum(abs(error) for error in errors) / count
        axis.text(1.02, at, f"{mean:.1%}", transform=axis.get_yaxis_transform(), va="center")
    axis.set_yticks(range(len(groups)), [f"{name} ({len(e)})" for name, e in groups.items()])
    axis.set_ylim(len(groups) - 0.5, -0.5)
    axis.set_xlim(-limit, limit)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}" if value else "0")
    axis.set_xlabel(said)


def make_figure(lines: float, panels: int = 1, **arguments: Any) -> tuple[Any, Any]:
    """A figure tall enough for ``lines`` lines of dots, and its panel or panels."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "equipoise", "font.size": 9, "text.color": INK, "axes.labelcolor": INK}
    )
    from matplotlib import pyplot

    size = (_WIDTH, 0.9 * panels + 0.27 * lines)
    figure, axes = pyplot.subplots(panels, 1, figsize=size, layout="constrained", **arguments)
    for axis in [axes] if panels == 1 else axes:
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(length=0)
    return figure, axes


def pipelines() -> Any:
    """G1 and G2: bubble rates, and throughput from profiled times."""
    bubbles = read("published/bubbles")
    names = ("1F1B", "ZB-H1", "ZB-H2", "ZB-1p", "ZB-2p")
    rates = {
        name: [row[name]["by span"] - row[name]["published"] for row in bubbles["rows"]]
        for name in (*names[:2], "1F1B-I", *names[2:])
    }
    table = read("published/throughput")["table 4 of arXiv:2401.10241 from its profiled times"]
    speeds: dict[str, list[float]] = {}
    for row in table["rows"]:
        speeds.setdefault(row["row"].split()[1], []).append(row["error"])
    figure, axes = make_figure(
        len(rates) + len(speeds), 2, height_ratios=(len(rates) + 1, len(speeds) + 1)
    )
    _dots(axes[0], rates, band=0.0001, limit=0.08, said="bubble rate, replayed less published")
    _dots(axes[1], speeds, band=0.04, limit=0.15, said="throughput, predicted over published − 1")
    return figure


def memory() -> Any:
    """G3: peaks and activations."""
    groups: dict[str, list[float]] = {}
    for row in read("published/memory")["rows"]:
        source = row["source"]
        name = f"arXiv:2205.05198 {source}" if source.startswith("figure") else source
        groups.setdefault(name, []).append(row["error"])
    figure, axis = make_figure(len(groups) + 1)
    _dots(axis, groups, band=0.08, limit=0.55, said="bytes, predicted over published − 1")
    return figure


def steps() -> Any:
    """G4: seconds of a step, each source left out of the fit."""
    rows_of = read("published/throughput")["left-out sources"]["rows"]
    groups = {
        _SOURCES.get(name, name.replace("_", " ")): [row["error"] for row in lines]
        for name, lines in rows_of.items()
    }
    figure, axis = make_figure(len(groups) + 1)
    _dots(axis, groups, band=0.08, limit=0.32, said="seconds, predicted over published − 1")
    return figure


def order() -> Any:
    """G5: Kendall's tau of each sweep."""
    sweeps = read("published/ranking")["sweeps by tokens per second"]
    figure, axis = make_figure(len(sweeps) + 1)
    axis.axvspan(0.8, 1.0, color=PALE, linewidth=0)
    for at, sweep in enumerate(sweeps.values()):
        axis.plot([0, sweep["tau"]], [at, at], color=BLUE, linewidth=1, alpha=0.4)
        axis.plot(sweep["tau"], at, "o", markersize=5, color=BLUE, clip_on=False)
        lost = f"{sweep['top-1 regret']:.1%}" if sweep["top-1 regret"] else "best"
        axis.text(1.04, at, lost, transform=axis.get_yaxis_transform(), va="center")
    labels = [
        f"{name.replace('_', ' ').replace('amp ', '')} ({s['rows']})" for name, s in sweeps.items()
    ]
    axis.set_yticks(range(len(sweeps)), labels)
    axis.set_ylim(len(sweeps) - 0.5, -0.5)
    axis.set_xlim(0, 1)
    axis.set_xlabel("Kendall's tau; at the right, what the predicted best loses")
    return figure


def collectives() -> Any:
    """G6: held-out points by size."""
    head, *lines = read("published/collectives")["halves of the H100's NCCL points"]["rows"]
    names = head.split(",")
    figure, axis = make_figure(8)
    axis.axhspan(-0.08, 0.08, color=PALE, linewidth=0)
    axis.axhline(0, color=INK, linewidth=0.8)
    rows = [dict(zip(names, line.split(",", len(names) - 1), strict=True)) for line in lines]
    for operation, color in _OPS.items():
        mine = [row for row in rows if row["op"] == operation and row["extrapolated"] == "False"]
        sizes = [int(row["bytes"]) for row in mine]
        errors = [float(row["error"]) for row in mine]
        axis.plot(sizes, errors, "o", markersize=3, color=color, alpha=0.6, label=operation)
    axis.set_xscale("log", base=2)
    axis.set_xticks([1 << 10, 1 << 15, 1 << 20, 1 << 25, 1 << 29])
    axis.set_xticklabels(["1 KiB", "32 KiB", "1 MiB", "32 MiB", "512 MiB"])
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:+.0%}" if value else "0")
    axis.set_ylabel("predicted over measured − 1")
    axis.set_ylim(-0.4, 0.4)
    axis.legend(ncols=2, frameon=False, handletextpad=0.1, columnspacing=1)
    return figure


FIGURES: dict[str, Callable[[], Any]] = {
    "pipelines": pipelines,
    "memory": memory,
    "steps": steps,
    "order": order,
    "collectives": collectives,
}


def save(figure: Any, file: Path) -> None:
    """Write the figure, the same bytes on every day, and print its path."""
    figure.savefig(file, metadata={"Date": None}, bbox_inches="tight", facecolor="white")
    print(file)


def main() -> None:
    """Write all of them into a folder."""
    for name, draw in FIGURES.items():
        save(draw(), Path(sys.argv[1]) / f"{name}.svg")


if __name__ == "__main__":
    main()
