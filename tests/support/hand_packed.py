"""A step of documents of given lengths, packed by hand."""

import numpy as np

from equipoise.spec.pack import MicroBatch, PackedStep


def packed_of(ranks: list[list[list[int]]]) -> PackedStep:
    """A step whose documents have these lengths: rank by rank, micro-batch by micro-batch."""

    def batch(lengths: list[int]) -> MicroBatch:
        rows = [[document, 0, stop] for document, stop in enumerate(lengths)]
        return MicroBatch(np.array(rows, dtype=np.int64).reshape(-1, 3))

    return PackedStep("by-hand", tuple(tuple(map(batch, batches)) for batches in ranks))
