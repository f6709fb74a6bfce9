"""Draw what ``plans_real`` wrote: seconds of a step, simulated beside measured, plan by plan.

``python -m bench.plans_real_plot docs/images/plans-real.svg``
"""

import json
import sys
from pathlib import Path

RESULTS = Path(__file__).with_name("results")

_INK, _PALE, _BLUE, _RED = "#1d2733", "#dfe6ec", "#2f6690", "#c8553d"


def main() -> None:
    """A line a plan: the bar is measured, its whisker all steps, the dot simulated."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "equipoise"
    from matplotlib import pyplot

    found = json.loads((RESULTS / "plans_real.json").read_text())
    rows = sorted(found["rows"], key=lambda row: row["measured_s"])
    figure, axis = pyplot.subplots(figsize=(6.4, 0.9 + 0.27 * len(rows)))
    for at, row in enumerate(rows):
        axis.barh(at, row["measured_s"], height=0.6, color=_PALE)
        axis.plot(
            [row["measured"]["min"], row["measured"]["max"]], [at, at], color=_INK, linewidth=0.8
        )
        is_near = abs(row["error"]) <= found["goal"]["error"]
        axis.plot(row["predicted_s"], at, "o", markersize=5, color=_BLUE if is_near else _RED)
        axis.text(
            1.02, at, f"{row['error']:+.1%}", transform=axis.get_yaxis_transform(), va="center"
        )
    axis.set_yticks(range(len(rows)), [row["plan"] for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(left=0)
    axis.set_xlabel(
        "seconds of a step: bar measured, line its steps, dot simulated; at the right the error"
    )
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(length=0)
    figure.savefig(sys.argv[1], metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    main()
