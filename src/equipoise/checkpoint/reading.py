"""Which bytes of a checkpoint's files each rank reads, and who verifies which block.

Why
    A checkpoint may be loaded by any layout. A rank of the new layout needs parts of what ranks of
    the old one have written: often a few columns of every row. Sums are of blocks of 4 MiB, though,
    and a rank that read every block it touches would read nearly all of the checkpoint.

What it decides
    What a rank needs of a stored chunk is a canonical strided block of the file's bytes
    (``schedule.block``); its runs are read, and no byte between them. A block that a rank
    needs whole is verified by its sum. Of any other block one rank, the *checker*, reads the rest,
    too, verifies it, and compares with it what the other ranks have read of it, by sums of just
    those runs::

        block of the file     a a a a b b b b a a a a b b b b      rows of 8 bytes, tp = 2
        rank 0, the checker   a a a a b b b b a a a a b b b b      verified by the manifest's sum
        rank 1                        b b b b         b b b b      its sum is compared by rank 0

    The checker is a rank that needs the block whole, if there is one; else the one that has the
    fewest bytes to read by then. So ranks read what they need, and between them the rest once.

Kept true (tests/unit/checkpoint/test_reading.py, by Hypothesis)
    Runs are the bytes of the index set, each once; every block is verified by one rank, and every
    run that is read of an unverified block is compared.

Sources
    Canonical strided blocks: TEMPI, arXiv:2012.14363.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.checkpoint.blocks import BLOCK_BYTES
from equipoise.checkpoint.index import Chunk
from equipoise.schedule.block import Block, Box, block_in

Runs = Ints
"""Bytes of a file, int64 [runs, 2]: first and stop of each, ascending, none empty."""

NO_RUNS: Runs = np.empty((0, 2), dtype=np.int64)


def overlap(chunk: Chunk, box: Box) -> Box | None:
    """What a box of a tensor has of a chunk, counted from the chunk's own corner.

    >>> overlap(Chunk((4, 0), (4, 6), "shard-00001.bin", 0, 96), [(0, 6), (3, 6)])
    [(0, 2), (3, 6)]
    """
    common = [
        (max(first, corner) - corner, min(stop, corner + length) - corner)
        for (first, stop), corner, length in zip(box, chunk.offsets, chunk.shape, strict=True)
    ]
    return common if all(first < stop for first, stop in common) else None


def bytes_of(chunk: Chunk, item_bytes: int, part: Box) -> Block:
    """A part of a chunk as a canonical block of its file's bytes.

    >>> bytes_of(Chunk((0, 0), (2, 6), "shard-00000.bin", 100, 48), 4, [(0, 2), (3, 6)])
    Block(offset=112, counts=(2, 12), strides=(24, 1))
    """
    strides = [item_bytes * math.prod(chunk.shape[dim + 1 :]) for dim in range(len(chunk.shape))]
    return block_in([*part, (0, item_bytes)], [*strides, 1], chunk.start)


def runs_of(block: Block) -> Runs:
    """The runs of a canonical block of bytes, in its order.

    >>> runs_of(Block(112, (2, 12), (24, 1))).tolist()
    [[112, 124], [136, 148]]
    """
    length, outer = 1, block
    if block.strides and block.strides[-1] == 1:
        length, outer = block.counts[-1], Block(block.offset, block.counts[:-1], block.strides[:-1])
    if not length:
        return NO_RUNS
    starts = outer.addresses()
    return np.stack((starts, starts + length), axis=1)


def join_runs(parts: Sequence[Runs]) -> Runs:
    """All bytes of several parts in as few runs as can be.

    >>> join_runs([np.array([[0, 4], [8, 12]]), np.array([[4, 6]])]).tolist()
    [[0, 6], [8, 12]]
    """
    runs = np.concatenate([NO_RUNS, *parts])
    if not len(runs):
        return NO_RUNS
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(runs[:, 1])
    begins = np.flatnonzero(np.append(True, runs[1:, 0] > reach[:-1]))
    ends = np.append(begins[1:], len(runs)) - 1
    return np.stack((runs[begins, 0], reach[ends]), axis=1)


def cut_runs(runs: Runs) -> tuple[Runs, Ints]:
    """Runs cut where verified blocks meet, and the number of each one's block.

    >>> cut_runs(np.array([[4194300, 4194310]]))[0].tolist()
    [[4194300, 4194304], [4194304, 4194310]]
    """
    firsts = runs[:, 0] // BLOCK_BYTES
    counts = (runs[:, 1] - 1) // BLOCK_BYTES - firsts + 1
    at = np.repeat(np.arange(len(runs)), counts)
    within = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
    numbers = firsts[at] + within
    starts = np.maximum(runs[at, 0], numbers * BLOCK_BYTES)
    stops = np.minimum(runs[at, 1], (numbers + 1) * BLOCK_BYTES)
    return np.stack((starts, stops), axis=1), numbers


@dataclass(frozen=True, slots=True, eq=False)
class FileReading:
    """What one rank reads of one file."""

    verified: frozenset[int]
    """Blocks that it reads whole and verifies."""
    runs: Runs
    """What it reads of others, cut where they meet."""
    compared: Mapping[int, tuple[int, ...]]
    """Ranks whose runs of a verified block are compared with it."""

    @property
    def read_bytes(self) -> int:
        """Bytes of ``runs``; verified blocks come on top."""
        return int((self.runs[:, 1] - self.runs[:, 0]).sum())


Needs = Mapping[str, Runs]
"""What a rank needs of each file."""


def needed_bytes(needs: Needs) -> int:
    """Bytes that a rank needs of all files."""
    return sum(int((runs[:, 1] - runs[:, 0]).sum()) for runs in needs.values())


def plan_readings(sizes: Mapping[str, int], needs: Sequence[Needs]) -> list[dict[str, FileReading]]:
    """Divide the reading and verifying of files over ranks.

    Args:
        sizes: Files whose blocks have sums, with their sizes [bytes]; others are not verified.
        needs: What each rank needs of each file, joined.

    Returns:
        Of each rank, what it reads of the files that it opens. It depends on the arguments alone,
        so that ranks that know each other's needs decide alike.
    """
    loads = np.array([needed_bytes(each) for each in needs], dtype=np.int64)
    plans: list[dict[str, FileReading]] = [{} for _ in needs]
    for name in sorted({*sizes, *(name for each in needs for name in each)}):
        cuts = [cut_runs(each.get(name, NO_RUNS)) for each in needs]
        if name in sizes:
            readings = _plan_file(sizes[name], cuts, loads)
        else:
            readings = [FileReading(frozenset(), runs, {}) for runs, _ in cuts]
        for plan, reading in zip(plans, readings, strict=True):
            if reading.verified or len(reading.runs):
                plan[name] = reading
    return plans


def _plan_file(
    size_bytes: int, cuts: Sequence[tuple[Runs, Ints]], loads: Ints
) -> list[FileReading]:
    """Plan one file; what checkers read beyond their needs is added to ``loads`` in place."""
    count = -(-size_bytes // BLOCK_BYTES)
    sizes = np.minimum(size_bytes - BLOCK_BYTES * np.arange(count, dtype=np.int64), BLOCK_BYTES)
    needed = np.zeros((len(cuts), count), dtype=np.int64)  # [ranks, blocks]
    for rank, (runs, numbers) in enumerate(cuts):
        np.add.at(needed[rank], numbers, runs[:, 1] - runs[:, 0])
    verifies = needed == sizes
    checkers = np.empty(count, dtype=np.int64)
    for block in range(count):
        wholes = np.flatnonzero(verifies[:, block])
        if len(wholes):
            checkers[block] = wholes[block % len(wholes)]
            continue
        rest = sizes[block] - needed[:, block]
        checker = int(np.argmin(loads + rest))
        loads[checker] += rest[checker]
        checkers[block], verifies[checker, block] = checker, True
    readings = []
    for rank, (runs, numbers) in enumerate(cuts):
        compared = {
            int(block): tuple(np.flatnonzero((needed[:, block] > 0) & ~verifies[:, block]).tolist())
            for block in np.flatnonzero(checkers == rank)
        }
        readings.append(
            FileReading(
                frozenset(np.flatnonzero(verifies[rank]).tolist()),
                runs[~verifies[rank][numbers]],
                {block: ranks for block, ranks in compared.items() if ranks},
            )
        )
    return readings


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """What a rank reads of a checkpoint's shards."""

    needed_bytes: int
    """What it loads."""
    read_bytes: int
    """That, and what it reads to verify blocks of which it needs only parts, or nothing."""
    ranges: int
    """Contiguous ranges of files."""


def count_reads(
    sizes: Mapping[str, int], needs: Needs, plan: Mapping[str, FileReading]
) -> ReadCounts:
    """Count what a rank reads by its plan."""
    read_bytes = ranges = 0
    for name, reading in plan.items():
        numbers = np.array(sorted(reading.verified), dtype=np.int64)
        stops = np.minimum((numbers + 1) * BLOCK_BYTES, sizes.get(name, 0))
        runs = join_runs([reading.runs, np.stack((numbers * BLOCK_BYTES, stops), axis=1)])
        read_bytes += int((runs[:, 1] - runs[:, 0]).sum())
        ranges += len(runs)
    return ReadCounts(needed_bytes(needs), read_bytes, ranges)
