"""What encodes images or sound for a decoder: sizes, and what an item costs.

Why
    An *item* is an image or a stretch of sound within a document. Items differ in size a
    hundredfold, so whoever shares them out needs their cost before anything is read.

What it decides
    An item is a grid of patches, and ``merge`` neighbouring patches become one token of the
    decoder. All numbers are counted from the sizes; nothing is measured.

Kept true (tests/unit/balance/modality/test_deal.py)
    Counted operations equal those of the products that an encoder computes.

Sources
    Native resolution, merged 2 x 2: Qwen2-VL, arXiv:2409.12191; MindVL, arXiv:2509.11662.
"""

from dataclasses import dataclass
from typing import Literal

from equipoise.base.arrays import Ints

ItemKind = Literal["image", "audio"]
KINDS: tuple[ItemKind, ...] = ("image", "audio")


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Sizes of an encoder."""

    kind: ItemKind
    layers: int
    hidden: int
    heads: int
    values: int
    """Numbers in one patch."""
    merge: tuple[int, int]
    """Rows and columns of patches that become one token."""

    @property
    def ffn(self) -> int:
        """Width of the feed-forward."""
        return 4 * self.hidden

    @property
    def merged(self) -> int:
        """Patches that become one token."""
        return self.merge[0] * self.merge[1]

    def multiplications(self, patches: Ints, width: int) -> Ints:
        """Multiplications of a forward pass over items, each on its own, int64 [items].

        Args:
            patches: Patches of each item.
            width: Hidden width of the decoder.
        """
        hidden, joined = self.hidden, self.merged * self.hidden
        layer = 4 * hidden * hidden + 2 * hidden * self.ffn
        rows = self.values * hidden + self.layers * layer
        join = (joined * joined + joined * width) // self.merged
        total: Ints = patches * (rows + join) + 2 * self.layers * hidden * patches * patches
        return total
