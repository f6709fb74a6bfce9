"""Draw what ``bench.planner.real`` wrote: seconds of a step, simulated and measured, plan by plan.

``python -m bench.planner.real_plot docs/images/foresight/plans-real.svg``
"""

import sys
import textwrap
from pathlib import Path

from bench.published.plot import BLUE, INK, PALE, RED, make_figure, read, save

_LETTERS = 28
"""Letters of a plan's name, beyond which it takes a second line."""


def main() -> None:
    """A line a plan: the bar is measured, its whisker all steps, the dot simulated."""
    results = read("planner/real")
    rows = sorted(results["rows"], key=lambda row: row["measured_s"])
    figure, axis = make_figure(len(rows) + 2)
    for at, row in enumerate(rows):
        axis.barh(at, row["measured_s"], height=0.6, color=PALE)
        ends = row["measured"]["min"], row["measured"]["max"]
        axis.plot(ends, [at, at], color=INK, linewidth=0.8)
        is_near = abs(row["error"]) <= results["goal"]["error"]
        axis.plot(row["predicted_s"], at, "o", markersize=5, color=BLUE if is_near else RED)
        error = f"{row['error']:+.1%}"
        axis.text(1.02, at, error, transform=axis.get_yaxis_transform(), va="center")
    axis.set_yticks(range(len(rows)), [textwrap.fill(row["plan"], _LETTERS) for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(left=0)
    axis.set_xlabel(
        "seconds of a step: the bar measured, the line its\nfastest and slowest, the dot simulated"
    )
    save(figure, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
