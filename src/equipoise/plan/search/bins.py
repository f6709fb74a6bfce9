"""One rank's micro-batches as a few bins of nearly as many tokens.

Why
    A rank has up to thousands of micro-batches, no two alike, and kernels of a layer take what
    their tokens take. A few dozen numbers of tokens serve every layout.

What it decides
    Micro-batches whose tokens round down to the same number are one bin. Each document keeps its
    own length, for attention takes what its documents take.

Kept true (tests/unit/plan/search/test_packs.py, tests/unit/plan/bounds/test_choices.py)
    Each document is in one bin; no micro-batch has fewer tokens than its bin says.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.sim.divided import Slices, typical_slices
from equipoise.sim.step import typical

Batches = Sequence[Sequence[int]]
"""One data-parallel rank's micro-batches: documents' lengths [tokens]."""


@dataclass(frozen=True, slots=True, eq=False)
class BinCores:
    """Forward and backward of the attention core on one context rank, float64 [2, bins] [s]."""

    mean: Floats
    below: Floats
    """What a micro-batch may take less than its bin's mean."""
    above: Floats
    """And more."""


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """One data-parallel rank's micro-batches, by their tokens."""

    documents: Ints
    """Of all micro-batches, or of one where all are alike, int64 [documents]."""
    batch_of: Ints
    """Of each document, int64 [documents]."""
    bin_of: Ints
    """Of each micro-batch, int64 [micro-batches]."""
    tokens: tuple[int, ...]
    """Of each bin, no more than any of its micro-batches has."""
    counts: Floats
    """Micro-batches of each bin, float64 [bins]."""
    typical: Ints
    """Documents of the micro-batch that layers are split for."""
    is_alike: bool
    """Whether all micro-batches have the same documents."""
    is_divided: bool = False
    """Whether documents are tiles, in place of each a document of as many pairs."""
    cores: dict[tuple[int, bool], BinCores] = field(default_factory=dict)
    """As they were priced: by tensor ranks, and whether there are context ranks."""

    def sum_cores(self, each: Sequence[Floats]) -> BinCores:
        """Cores of bins, of forward and backward of each document [s]."""
        batches, bins = len(self.bin_of), len(self.tokens)
        found = []
        for one in each:
            whole = np.bincount(self.batch_of, one, batches)
            mean = np.bincount(self.bin_of, whole, bins) / np.bincount(self.bin_of)
            below, above = np.zeros((2, bins))
            np.maximum.at(below, self.bin_of, mean[self.bin_of] - whole)
            np.maximum.at(above, self.bin_of, whole - mean[self.bin_of])
            found.append((mean, below, above))
        return BinCores(*np.array(found).swapaxes(0, 1))


def sort_batches(batches: Batches, grain: int = 1) -> Bins:
    """Put a rank's micro-batches into bins.

    Args:
        batches: Documents of each micro-batch.
        grain: Tokens that micro-batches of one bin differ by, at most.

    >>> bins = sort_batches([[3], [9], [1, 1], [4]], grain=2)
    >>> bins.tokens, bins.counts.tolist(), bins.typical.tolist()
    ((2, 4, 8), [2.0, 1.0, 1.0], [4])
    """
    median = np.sort(typical([batches]).astype(np.int64))
    if all(batch == batches[0] for batch in batches):
        documents, count = np.array(batches[0], dtype=np.int64), np.array([float(len(batches))])
        first, alike = np.zeros(1, dtype=np.int64), np.zeros(len(documents), dtype=np.int64)
        return Bins(documents, alike, first, (int(documents.sum()),), count, median, is_alike=True)
    documents = np.array([length for batch in batches for length in batch], dtype=np.int64)
    batch_of = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
    sums = np.bincount(batch_of, documents, len(batches)).astype(np.int64)
    return Bins(documents, batch_of, *_round(sums, grain), median, is_alike=False)


def sort_slices(batches: Sequence[Slices], grain: int = 1) -> Bins:
    """Likewise, micro-batches of divided documents.

    Args:
        batches: Of one data-parallel rank.
        grain: Tokens that micro-batches of one bin differ by, at most.
    """
    alike = [np.sqrt(2.0 * each.pairs).astype(np.int64) for each in batches]
    tiles = [
        np.concatenate((batch.doc_tokens, more)) for batch, more in zip(batches, alike, strict=True)
    ]
    batch_of = np.repeat(np.arange(len(batches)), list(map(len, tiles)))
    sums = np.array([each.tokens for each in batches], dtype=np.int64)
    median = np.sort(typical_slices(batches).doc_tokens)
    documents = np.concatenate(tiles)
    rest = _round(sums, grain)
    return Bins(documents, batch_of, *rest, median, is_alike=False, is_divided=True)


def _round(sums: Ints, grain: int) -> tuple[Ints, tuple[int, ...], Floats]:
    """Bin of each micro-batch, tokens of each bin, and how many it has."""
    # Kernels of no tokens have no price.
    rounded = np.where(sums < grain, sums, sums // grain * grain)
    tokens, bin_of, counts = np.unique(rounded, return_inverse=True, return_counts=True)
    return bin_of.reshape(-1), tuple(tokens.tolist()), counts.astype(np.float64)
