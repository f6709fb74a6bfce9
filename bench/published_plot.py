"""Draw what ``throughput_published`` and ``memory_published`` wrote: predicted over published.

``python -m bench.published_plot docs/images/published.svg``
"""

import json
import sys
from pathlib import Path

RESULTS = Path(__file__).with_name("results")


def main() -> None:
    """One point a row, one column a source; the band is the goal."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "equipoise"
    from matplotlib import pyplot

    throughput = json.loads((RESULTS / "throughput_published.json").read_text())
    memory = json.loads((RESULTS / "memory_published.json").read_text())
    groups = {
        name: [row["error"] for row in rows]
        for name, rows in throughput["left-out sources"]["rows"].items()
    }
    held: dict[str, list[float]] = {}
    for row in memory["rows"]:
        held.setdefault(row["source"], []).append(row["error"])
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6), width_ratios=(2, 1), sharey=True)
    titles = "seconds of a step, each source left out of the fit", "memory, nothing fitted"
    for axis, title, sources in zip(axes, titles, (groups, held), strict=True):
        axis.axhspan(-0.08, 0.08, color="#e7ebef", linewidth=0)
        axis.axhline(0, color="#1d2733", linewidth=0.8)
        for at, errors in enumerate(sources.values()):
            count = len(errors)
            places = [at - 0.3 + 0.6 * (i + 0.5) / count for i in range(count)]
            axis.plot(places, errors, "o", markersize=3, color="#4c7aae", alpha=0.6)
        axis.set_xticks(range(len(sources)), sources, rotation=35, ha="right", fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("predicted over published, minus 1")
    axes[0].set_ylim(-0.55, 0.55)
    axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")
    figure.tight_layout()
    figure.savefig(sys.argv[1], metadata={"Date": None})


if __name__ == "__main__":
    main()
