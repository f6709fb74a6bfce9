"""Strided blocks of memory in one canonical form.

Why
    A rank's shard, a slice of a checkpoint's tensor, and the blocks of a key/value cache are all
    elements at regular distances in flat memory. With one description, one piece of code moves
    them, and contiguous elements are recognised.

What it decides
    A ``Block`` is an offset, and counts and strides of nested loops, outermost first. Two blocks
    that walk the same elements in the same order may look different; ``canonical`` makes them
    equal: loops of one turn are dropped, and a loop whose stride is the span of the next one is
    merged with it::

        rows 2 to 4 of a tensor [4, 3, 5]:  offset 30, counts 2 3 5, strides 15 5 1
        canonical                           offset 30, counts 30,    strides 1

    ``in_memory_order`` also sorts loops by stride: the same elements in memory order.
    ``join_blocks`` joins equal blocks at equal distances, so one copy packs the parts of several
    ranks.

Kept true (tests/unit/parallel/boxing/test_blocks.py, by Hypothesis)
    The canonical form is idempotent and walks the same elements in the same order; equal walks
    have equal forms; joined blocks are the same walk.

Sources
    TEMPI's rewriting of MPI data types: arXiv:2012.14363.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Ints

Box = Sequence[tuple[int, int]]
"""First and stop of each dim."""


@dataclass(frozen=True, slots=True)
class Block:
    """Elements ``offset + sum(i * stride)`` of a flat memory, the last loop fastest."""

    offset: int
    counts: tuple[int, ...]
    """Turns of each loop, outermost first."""
    strides: tuple[int, ...]
    """Elements from one turn to the next."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.counts)

    @property
    def is_run(self) -> bool:
        """Whether a canonical block is contiguous."""
        return not self.counts or (len(self.counts) == 1 and self.strides == (1,))

    def canonical(self) -> "Block":
        """The canonical form of this walk.

        >>> Block(30, (2, 3, 1, 5), (15, 5, 7, 1)).canonical()
        Block(offset=30, counts=(30,), strides=(1,))
        """
        if not self.elements:
            return Block(0, (0,), (1,))
        counts: list[int] = []
        strides: list[int] = []
        for count, stride in zip(self.counts, self.strides, strict=True):
            if count == 1:
                continue
            if counts and strides[-1] == count * stride:
                counts[-1], strides[-1] = counts[-1] * count, stride
            else:
                counts.append(count)
                strides.append(stride)
        return Block(self.offset, tuple(counts), tuple(strides))

    def in_memory_order(self) -> "Block":
        """The same elements, lower addresses first if loops do not interleave.

        >>> Block(0, (3, 4), (1, 3)).in_memory_order()
        Block(offset=0, counts=(12,), strides=(1,))
        """
        loops = sorted(zip(self.strides, self.counts, strict=True), reverse=True)
        counts, strides = tuple(c for _, c in loops), tuple(s for s, _ in loops)
        return Block(self.offset, counts, strides).canonical()

    def addresses(self) -> Ints:
        """Every element's address, in order, int64 [elements]."""
        places = np.full(1, self.offset, dtype=np.int64)
        for count, stride in zip(self.counts, self.strides, strict=True):
            places = (places[:, None] + stride * np.arange(count, dtype=np.int64)).reshape(-1)
        return places


def block_in(box: Box, strides: Sequence[int], offset: int = 0) -> Block:
    """A part of a tensor, as a canonical block.

    The strides are those of the tensor's dims in memory, ``offset`` that of its first element.

    >>> block_in([(1, 3), (2, 5)], strides=(6, 1))
    Block(offset=8, counts=(2, 3), strides=(6, 1))
    """
    firsts = sum(first * stride for (first, _), stride in zip(box, strides, strict=True))
    counts = tuple(stop - first for first, stop in box)
    return Block(offset + firsts, counts, tuple(strides)).canonical()


def join_blocks(blocks: Sequence[Block]) -> list[Block]:
    """The same walk through all blocks, in order, in as few blocks as looking ahead finds.

    >>> join_blocks([Block(4 * i, (2,), (1,)) for i in (0, 1, 2, 5)])
    [Block(offset=0, counts=(3, 2), strides=(4, 1)), Block(offset=20, counts=(2,), strides=(1,))]
    """
    joined: list[Block] = []
    at = 0
    while at < len(blocks):
        first = blocks[at]
        stop = at + 1
        if stop < len(blocks):
            distance = blocks[stop].offset - first.offset
            while (
                stop < len(blocks)
                and distance > 0
                and blocks[stop].offset - blocks[stop - 1].offset == distance
                and (blocks[stop].counts, blocks[stop].strides) == (first.counts, first.strides)
            ):
                stop += 1
            counts, strides = (stop - at, *first.counts), (distance, *first.strides)
        if stop - at > 1:
            first = Block(first.offset, counts, strides)
        joined.append(first.canonical())
        at = stop
    return joined
