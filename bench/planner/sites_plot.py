"""Draw what joins sites: a port of each node, and the trunk that all ports share.

``python -m bench.planner.sites_plot docs/images/foresight/sites.svg``
"""

import sys
from pathlib import Path

from matplotlib.patches import FancyBboxPatch

from bench.published.plot import INK, PALE, RED, make_figure, save

_SITES = ("north", "west", "south")
_NODES = 4


def draw(file: Path) -> None:
    """One picture: sites of nodes, a port each, and the pipe that they share."""
    figure, axes = make_figure(7)
    for place, site in enumerate(_SITES):
        left = place * 3.0
        axes.add_patch(
            FancyBboxPatch((left, 0.9), 2.4, 1.1, "round,pad=0.08", fc="white", ec=INK, lw=0.8)
        )
        axes.text(left + 1.2, 2.2, f'name = "{site}"', ha="center", fontsize=8, color=INK)
        for node in range(_NODES):
            x = left + 0.05 + 0.6 * node
            axes.add_patch(FancyBboxPatch((x, 1.3), 0.45, 0.55, "round,pad=0.02", fc=PALE, ec=INK))
            axes.plot([x + 0.22, left + 1.2], [1.28, 0.45], color=INK, lw=1.0)
        axes.plot([left + 1.2, left + 1.2], [0.45, 0.1], color=RED, lw=5.0, solid_capstyle="butt")
    axes.plot([1.2, 7.2], [0.1, 0.1], color=RED, lw=5.0, solid_capstyle="round")
    axes.text(8.6, 1.0, "between: a port\na node", fontsize=8, color=INK, va="center")
    axes.text(7.45, 0.1, "trunk_gbit_per_s: one pipe, shared", fontsize=8, color=RED, va="center")
    axes.set_xlim(-0.3, 11.0)
    axes.set_ylim(-0.2, 2.5)
    axes.axis("off")
    save(figure, file)


def main() -> None:
    draw(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
