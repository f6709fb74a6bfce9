"""A group of ranks by what they differ in, without a list of them.

What it decides
    Nothing: ``spec.layout`` knows who they are. A group of a hundred thousand ranks is a key of a
    few words, by which its prices are remembered.

Kept true (tests/unit/spec/test_layout.py)
    Its ranks are those of the layout's group.
"""

from dataclasses import dataclass

from equipoise.base.arrays import Ints
from equipoise.spec.layout import Layout


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks of a layout that differ in some axes."""

    layout: Layout
    axes: tuple[str, ...]
    """What they differ in; rank 0 is among them."""
    size: int
    """How many of them."""
    step: int = 1
    """Each of them, or the first of every ``step``."""

    def __len__(self) -> int:
        return self.size

    @property
    def ranks(self) -> Ints:
        """Their numbers, int64 [ranks].

        >>> RankGroup(Layout(dp=6), ("dp", "cp"), 3, step=2).ranks.tolist()
        [0, 2, 4]
        """
        return self.layout.ranks_of(0, *self.axes)[:: self.step][: self.size]
