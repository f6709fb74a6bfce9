"""Draw what ``recsys.sessions`` and ``recsys.precision`` printed: give both files, and a PNG."""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

_COLOURS = ("#c9d3dd", "#8fa7bf", "#1d4e79", "#c8553d")


def main() -> None:
    """Samples of a distinct row by order on the left, hit rates by policy on the right."""
    sessions, precision = (json.loads(Path(each).read_text()) for each in sys.argv[1:3])
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    shares = sessions["samples_a_row"]
    orders = list(dict.fromkeys(name.rpartition(", batch")[0] for name in shares))
    batches = list(dict.fromkeys(name.rpartition("batch ")[2] for name in shares))
    for place, order in enumerate(orders):
        heights = [shares[f"{order}, batch {batch}"]["users"] for batch in batches]
        at = [each + 0.27 * (place - 1) for each in range(len(batches))]
        bars = left.bar(at, heights, 0.25, color=_COLOURS[place], label=order)
        left.bar_label(bars, fmt="%.1f", fontsize=8)
    left.set_xticks(range(len(batches)), [f"batch {each}" for each in batches])
    left.set_title("samples of a distinct row of users' columns", fontsize=10)
    left.legend(fontsize=8, frameon=False, loc="upper left")
    left.set_ylim(0, 68)
    rates = {name: row for name, row in precision["hit_rates"].items() if "5%" in name}
    for place, policy in enumerate(("lru", "lfu", "trace", "belady")):
        heights = [row[policy] for row in rates.values()]
        at = [each + 0.21 * (place - 1.5) for each in range(len(rates))]
        label = "Belady's bound" if policy == "belady" else policy
        bars = right.bar(at, heights, 0.19, color=_COLOURS[place], label=label)
        right.bar_label(bars, fmt="%.2f", fontsize=8)
    right.set_xticks(range(len(rates)), ["films", "users"])
    right.set_title("rows found in a cache of 5% of the rows", fontsize=10)
    right.legend(fontsize=8, frameon=False, loc="upper left")
    right.set_ylim(0, 1)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(sys.argv[3], dpi=150)


if __name__ == "__main__":
    main()
