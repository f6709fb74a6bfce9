"""Images and sound within documents: where each lies, and how large it is.

What it decides
    Nothing. An item stands in its document as a run of stand-in tokens, one for each of its rows;
    they are never learned, and whichever token stands in, the row of an encoder replaces it.

Kept true (tests/unit/data/modality/test_items.py)
    Items lie in the order of documents and of tokens, and never overlap.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from equipoise.base.arrays import Ints

Patches = npt.NDArray[np.float32]
"""Numbers of an item's patches, float32 [patches, values]."""


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Items of a corpus, in the order of its documents."""

    first: Ints
    """First item of each document, and the number of items, int64 [documents + 1]."""
    begin: Ints
    """First token of each within its document, int64 [items]."""
    rows: Ints
    """Tokens that stand in for each, int64 [items]."""
    kind: Ints
    """Index of its kind in ``spec.modality.encoder.KINDS``, int64 [items]."""
    grid: Ints
    """Rows and columns of patches, int64 [items, 2]."""
    content: Ints
    """Digest of each one's file, in two halves, int64 [items, 2]."""
    load: Callable[[int], Patches] = field(repr=False)
    """Reads the patches of one."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.begin)

    @property
    def patches(self) -> Ints:
        """Patches of each, int64 [items]."""
        total: Ints = self.grid.prod(axis=1)
        return total

    def of(self, document: int) -> slice:
        """The items of a document."""
        return slice(int(self.first[document]), int(self.first[document + 1]))

    def within(self, document: int, start: int, stop: int) -> Ints:
        """Items of a document of which some token lies in [start, stop), ascending."""
        of_document = np.arange(self.first[document], self.first[document + 1])
        begin = self.begin[of_document]
        return of_document[(begin < stop) & (begin + self.rows[of_document] > start)]
