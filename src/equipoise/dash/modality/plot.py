"""Items on ranks as a picture: what every rank encodes, dealt in turn and by work.

What it decides
    A row of panels for each way to deal, a bar for each rank; a bar is made of the step's items,
    largest first, so that one huge image shows as one block. A solid line is the mean.

Kept true (tests/unit/dash/test_modality_plot.py)
    The blocks of a bar add up to its rank's work; the same items give the same bytes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from equipoise.balance.modality.deal import Dealt
from equipoise.base.arrays import Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _SOFT, _PALE = "#1d2733", "#5b616b", "#e7ebef"
_BLOCKS = ("#0072b2", "#56a0cc")
_GIGA = 1e9


def plot_items(file: Path, steps: Sequence[tuple[Ints, Dealt]], title: str) -> None:
    """Draw the items of some steps, dealt in turn above and by work below, on one scale.

    Args:
        file: Where to; the ending says whether PNG, SVG or PDF.
        steps: Work of each step's items, and who encodes them.
        title: Whose items, and for whom.
    """
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "equipoise"  # the same picture, the same file
    from matplotlib import pyplot

    size = max(5.4, 2.4 * len(steps) + 0.8), 5.0
    figure, axes = pyplot.subplots(
        2, len(steps), figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for at, (work, dealt) in enumerate(steps):
        in_turn = np.arange(len(work)) % dealt.ranks
        ways = (("in turn", in_turn, dealt.skew_in_turn), ("by work", dealt.owner, dealt.skew))
        for axis, (name, owner, skew) in zip(axes[:, at], ways, strict=True):
            _draw(axis, work, owner, dealt.ranks)
            axis.set_title(f"step {at + 1}, {name}: {skew:.2f}", fontsize=9, loc="left")
    for axis in axes[:, 0]:
        axis.set_ylabel("multiplications [G]", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("rank", fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=_INK)
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def blocks_of(work: Ints, owner: Ints, rank: int) -> Ints:
    """Work of a rank's items, largest first."""
    mine: Ints = np.sort(work[owner == rank])[::-1]
    return mine


def _draw(axis: "Axes", work: Ints, owner: Ints, ranks: int) -> None:
    for rank in range(ranks):
        below = 0.0
        for turn, block in enumerate(blocks_of(work, owner, rank).tolist()):
            high = block / _GIGA
            axis.bar(
                rank, high, bottom=below, width=0.8, color=_BLOCKS[turn % 2],
                edgecolor="white", linewidth=0.4,
            )  # fmt: skip
            below += high
    axis.axhline(float(work.sum()) / ranks / _GIGA, color=_INK, linewidth=1)
    axis.set_xticks(range(ranks))
    axis.tick_params(labelsize=8, colors=_SOFT)
    axis.grid(visible=True, axis="y", color=_PALE)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
