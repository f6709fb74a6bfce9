"""Draw gains of packing policies beside their bounds, from what ``bench.published.wlb`` wrote.

``python -m bench.published.policies_plot docs/images/foresight`` writes ``policies.svg``: a line
for each configuration, a dot for each policy, and a tick where no policy can go.
"""

import sys
from pathlib import Path
from typing import Any

from bench.published.plot import BLUE, INK, PALE, RED, read

_STYLES = {
    "by-work": ("o", "#8d6a9f"),
    "delayed": ("s", RED),
    "divided-in-time": ("v", "#d9a441"),
    "divided": ("D", "#6a994e"),
    "gangs": ("o", BLUE),
}


def draw(file: Path) -> None:
    """Write the picture."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "policies"
    from matplotlib import pyplot

    rows: list[dict[str, Any]] = read("published/wlb")["rows"]
    figure, axis = pyplot.subplots(figsize=(5.4, 0.42 * len(rows) + 1.3), layout="constrained")
    for at, row in enumerate(rows):
        axis.plot([1.0, row["bound_of_gain"]], [at, at], color=PALE, linewidth=6, zorder=0)
        axis.plot([row["bound_of_gain"]], [at], "|", color=INK, markersize=12)
        for each in row["rows"]:
            if each["policy"] in _STYLES:
                shape, color = _STYLES[each["policy"]]
                fill = color if each["fits"] else "none"
                label = each["policy"] if at == 0 else None
                axis.plot(
                    *([each["gain"]], [at], shape),
                    markersize=5,
                    color=color,
                    markerfacecolor=fill,
                    label=label,
                )
    axis.axvline(1.4, color=INK, linewidth=0.6, linestyle=":")
    axis.set_yticks(range(len(rows)), [row["configuration"] for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(left=0.95)
    axis.set_xlabel("times as fast as plain packing; | the most that is possible")
    axis.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0))
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(length=0)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) / "policies.svg")
