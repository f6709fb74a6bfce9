"""One rank's reading of a checkpoint's files, as ``checkpoint.reading`` has planned it.

What it decides
    Verified blocks are read whole and held one at a time. Of other blocks nothing but the runs
    that are asked for is read; each block's runs go into a sum, which the block's checker compares
    with the same runs of the verified block. One file is open at a time: thousands of ranks may
    have written as many, and a process may have some thousand open.

Kept true (tests/unit/checkpoint/test_parts.py)
    Whatever the layouts, each rank reads just the bytes that its plan counts; a byte that changed
    anywhere is noticed by some rank, also where only one reader of several gets another one.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.blocks import BLOCK_BYTES, BlockReader, DamagedBlockError, SummedFile
from equipoise.checkpoint.index import Index
from equipoise.checkpoint.manifest import Manifest, damaged
from equipoise.checkpoint.reading import (
    NO_RUNS,
    FileReading,
    Needs,
    ReadCounts,
    Runs,
    count_reads,
    cut_runs,
    join_runs,
    plan_readings,
    runs_of,
)
from equipoise.schedule.block import Block

Sums = dict[tuple[str, int], str]
"""The sum of what a rank has read of a block, by file and the block's number."""


_NOTHING = -1, memoryview(b"")
"""What is held of a file of which no block has been read."""


class PartReader:
    """Reads one rank's parts of one file.

    Args:
        path: The file.
        summed: What was written to it; None where every byte was verified before.
        reading: What this rank reads.
        needs: What each rank needs of the file.
    """

    def __init__(
        self, path: Path, summed: SummedFile | None, reading: FileReading, needs: Sequence[Runs]
    ) -> None:
        self._path, self._summed = path, summed
        self._reading, self._needs = reading, needs
        self._file: FileIO | None = None
        self._blocks: BlockReader | None = None
        self._sums: dict[int, Any] = {}
        self._held = _NOTHING
        self._checked: set[int] = set()
        self.expected: dict[tuple[int, int], str] = {}
        """By block and rank, the sum of what that rank needs of the block."""
        self.read_bytes = 0

    @property
    def sums(self) -> dict[int, str]:
        """By block, the sum of what was read of one that is not verified here."""
        return {number: each.hexdigest() for number, each in self._sums.items()}

    def fill(self, block: Block, out: memoryview) -> None:
        """Read the bytes of a canonical block, in its order.

        Raises:
            DamagedBlockError: a block that is verified has changed, or the file is shorter.
        """
        runs, numbers = cut_runs(runs_of(block))
        at = 0
        for (start, stop), number in zip(runs.tolist(), numbers.tolist(), strict=True):
            place = out[at : at + stop - start]
            if number in self._reading.verified:
                inside = start - number * BLOCK_BYTES
                place[:] = self._block(number)[inside : inside + stop - start]
            else:
                self._read(place, start)
                if self._summed is not None:
                    self._sums.setdefault(number, xxhash.xxh3_128()).update(place)
            at += stop - start

    def verify_rest(self) -> None:
        """Read and verify the blocks of this rank of which it needed nothing.

        Raises:
            DamagedBlockError: one has changed.
        """
        for number in sorted(self._reading.verified - self._checked):
            self._block(number)

    def close(self) -> None:
        """Close the file; it is opened again where more of it is read."""
        for file in (self._file, self._blocks):
            if file is not None:
                file.close()
        self._file = self._blocks = None
        self._held = _NOTHING

    def _block(self, number: int) -> memoryview:
        held, data = self._held
        if held == number:
            return data
        assert self._summed is not None  # noqa: S101
        if self._blocks is None:
            self._blocks = BlockReader(self._path, self._summed)
        data = self._blocks.read(number)
        self.read_bytes += len(data)
        self._held = number, data
        if number not in self._checked:
            self._checked.add(number)
            first = number * BLOCK_BYTES
            for rank in self._reading.compared.get(number, ()):
                part = xxhash.xxh3_128()
                for start, stop in _within(self._needs[rank], first, first + len(data)).tolist():
                    part.update(data[start - first : stop - first])
                self.expected[number, rank] = part.hexdigest()
        return data

    def _read(self, place: memoryview, start: int) -> None:
        done = 0
        if self._file is None:
            self._file = self._path.open("rb", buffering=0)
        while done < len(place):
            count = os.preadv(self._file.fileno(), [place[done:]], start + done)
            if not count:
                raise DamagedBlockError(self._path.name, start, start + len(place))
            done += count
        self.read_bytes += len(place)


def _within(runs: Runs, first: int, stop: int) -> Runs:
    """The parts of runs in a span."""
    chosen = runs[np.searchsorted(runs[:, 1], first, "right") : np.searchsorted(runs[:, 0], stop)]
    return np.clip(chosen, first, stop)


class RankReader:
    """Reads one rank's parts of a checkpoint's files.

    Args:
        folder: The checkpoint.
        index: Its tensors, to name what is damaged.
        manifest: As ``open_manifest`` returned it, to verify what is read; without one every byte
            was verified before.
        needs: What each rank needs.
        rank: Which of them this one is.

    """

    def __init__(
        self,
        folder: Path,
        index: Index,
        manifest: Manifest | None,
        needs: Sequence[Needs],
        rank: int,
    ) -> None:
        self._folder, self._index, self._manifest = folder, index, manifest
        self._needs, self._rank = needs, rank
        sizes = summed_sizes(manifest)
        self.plan = plan_readings(sizes, needs)[rank]
        self.counts: ReadCounts = count_reads(sizes, needs[rank], self.plan)
        """What it will have read."""
        self._parts: dict[str, PartReader] = {}
        self._open: PartReader | None = None

    @property
    def read_bytes(self) -> int:
        """Bytes that have been read."""
        return sum(each.read_bytes for each in self._parts.values())

    def fill(self, name: str, block: Block, out: memoryview) -> None:
        """Read a canonical block of a file's bytes; those of one file in ascending order.

        Raises:
            CheckpointError: it has changed, or cannot be read; names the file and what is in it.
        """
        with self._named(name):
            self._file(name).fill(block, out)

    def verify_rest(self) -> None:
        """Verify the blocks of this rank of which it needed nothing.

        Raises:
            CheckpointError: one has changed, or cannot be read.
        """
        for name in self.plan:
            with self._named(name):
                self._file(name).verify_rest()

    @property
    def sums(self) -> Sums:
        """What this rank has read of blocks that others verify."""
        return {
            (name, number): each
            for name, part in self._parts.items()
            for number, each in part.sums.items()
        }

    @property
    def expected(self) -> dict[tuple[str, int, int], str]:
        """By file, block and rank, the sum of what that rank should have read."""
        return {
            (name, number, rank): each
            for name, part in self._parts.items()
            for (number, rank), each in part.expected.items()
        }

    def compare(
        self, sums: Sequence[Sums], expected: Iterable[Mapping[tuple[str, int, int], str]]
    ) -> None:
        """Compare what all ranks have read of blocks with what was verified.

        Args:
            sums: Of each rank.
            expected: Of each rank.

        Raises:
            CheckpointError: a rank has read other bytes; names them, and a tensor in them.
        """
        verified = {key: each for by_rank in expected for key, each in by_rank.items()}
        for rank, mine in enumerate(sums):
            for (name, number), each in sorted(mine.items()):
                if verified.get((name, number, rank)) != each:
                    first = number * BLOCK_BYTES
                    runs = _within(self._needs[rank][name], first, first + BLOCK_BYTES)
                    raise damaged(
                        self._folder,
                        self._index,
                        DamagedBlockError(name, int(runs[0, 0]), int(runs[-1, 1])),
                    )

    def close(self) -> None:
        """Close the file that is open; what is known of all stays."""
        if self._open is not None:
            self._open.close()
        self._open = None

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Name the file, and what is lost of it, where reading fails."""
        try:
            yield
        except DamagedBlockError as error:
            raise damaged(self._folder, self._index, error) from error
        except OSError as error:
            raise CheckpointError(
                f"{self._folder} is torn: {name} cannot be read ({error.strerror})."
            ) from error

    def _file(self, name: str) -> PartReader:
        if name not in self._parts:
            path = self._folder / name
            summed = None if self._manifest is None else self._manifest.summed(name)
            reading = self.plan.get(name, FileReading(frozenset(), NO_RUNS, {}))
            needs = [each.get(name, NO_RUNS) for each in self._needs]
            self._parts[name] = PartReader(path, summed, reading, needs)
        part = self._parts[name]
        if part is not self._open:
            self.close()
            self._open = part
        return part

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def summed_sizes(manifest: Manifest | None) -> dict[str, int]:
    """Files whose blocks have sums, with their sizes [bytes]."""
    if manifest is None:
        return {}
    return {name: manifest.files[name][0] for name in manifest.blocks}


def needs_of(blocks: Mapping[str, Sequence[Block]]) -> Needs:
    """What a rank needs of each file, joined."""
    return {name: join_runs([runs_of(each) for each in mine]) for name, mine in blocks.items()}
