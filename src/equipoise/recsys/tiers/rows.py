"""Rows with their optimizer state in a file of blocks.

Why
    A table that exceeds the memory trains all the same: fast rows lie in slots, and the file is
    read for the others while the step before computes.

What it decides
    A record is a row and its optimizer state, so that nothing of a table grows with it in memory
    but 12 bytes a block. As many records as fit lie in a block of 4,096 bytes, or of more pages if
    one is larger. A block is drawn when it is first read, never before. Rows that were fetched
    ahead and then written are read again.

Kept true (tests/unit/recsys/tiers/test_rows.py, tests/multi/recsys/test_tiers.py)
    Weights and states equal those of a table in memory, to the bit; bytes are whole blocks.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from equipoise.base.arrays import Ints
from equipoise.base.errors import CheckpointError
from equipoise.memory.blocks import PAGE_BYTES, BlockFile

DrawBlock = Callable[[Ints], np.ndarray]
"""First records of some places, float32 [n, width] of int64 [n]."""


COMMIT = "commit"
"""The mark of a file's content, in a checkpoint."""


class FileRows:
    """A tier for ``CachedRows``."""

    def __init__(self, file: BlockFile, count: int, width: int, draw: DrawBlock) -> None:
        """Rows of a file.

        Args:
            file: Blocks of ``pages_per_block(width)`` pages, enough for all rows.
            count: How many rows lie here.
            width: Floats of a record.
            draw: A block's first records.
        """
        self.file, self.count, self.width = file, count, width
        self.per_block = records_per_block(width)
        self.rows_read = 0
        self.stall_s = 0.0
        """Seconds that steps waited for the file."""
        self._draw = draw
        self._lock = Lock()
        self._ahead: tuple[np.ndarray, Future[np.ndarray]] | None = None
        self._written: list[np.ndarray] = []
        self._pool = ThreadPoolExecutor(1)

    @property
    def held_bytes(self) -> int:
        """As ``held_of_blocks``."""
        return held_of_blocks(self.count, self.width)

    def read(self, at: Tensor) -> Tensor:
        """Records at some places, float32 [n, width]."""
        rows = at.cpu().numpy()
        began = time.perf_counter()
        records = np.empty((len(rows), self.width), dtype=np.float32)
        is_left = np.ones(len(rows), dtype=bool)
        if self._ahead is not None:
            fetched, waiting = self._ahead
            ahead = waiting.result()
            self._ahead = None
            stale = np.concatenate(self._written) if self._written else rows[:0]
            place = np.searchsorted(fetched, rows).clip(max=max(0, len(fetched) - 1))
            if len(fetched):
                is_left = (fetched[place] != rows) | np.isin(rows, stale)
                records[~is_left] = ahead[place[~is_left]]
        records[is_left] = self._read(rows[is_left])
        self.rows_read += len(rows)
        self.stall_s += time.perf_counter() - began
        return torch.from_numpy(records).to(at.device)

    def fetch(self, rows: Ints) -> None:
        """Begin to read ascending rows, which the next ``read`` wants."""
        self._written = []
        self._ahead = (rows, self._pool.submit(self._read, rows))

    def write(self, at: Tensor, values: Tensor, step: int) -> None:
        """Records to some places."""
        del step
        rows, records = at.cpu().numpy(), values.cpu().numpy()
        order = np.argsort(rows, kind="stable")
        rows, records = rows[order], records[order]
        if self._ahead is not None:
            self._written.append(rows)
        with self._lock:
            for block, part in self._by_block(rows):
                begin = block * self.per_block
                whole = self._block(block).copy()
                whole[rows[part] - begin] = records[part]
                data = np.zeros(self.file.block_bytes // 4, dtype=np.float32)
                data[: whole.size] = whole.reshape(-1)
                self.file.write(block, data.tobytes())

    def arrays(self) -> dict[str, np.ndarray]:
        """The commits of a file hold its rows, so a checkpoint has their mark alone."""
        return {COMMIT: self.file.mark()}

    def take(self, own: Ints, theirs: Ints, arrays: Mapping[str, np.ndarray]) -> None:
        """The file was opened at the checkpoint's commit, by a shard of the very same rows."""
        self.file.require(arrays.get(COMMIT))
        if not np.array_equal(own, theirs) or len(own) != self.count:
            raise CheckpointError(
                f"A file has {self.count:,} rows of another shard. Go on with the layout and the "
                "tables that the run was begun with."
            )

    def _read(self, rows: np.ndarray) -> np.ndarray:
        records = np.empty((len(rows), self.width), dtype=np.float32)
        with self._lock:
            for block, part in self._by_block(rows):
                records[part] = self._block(block)[rows[part] - block * self.per_block]
        return records

    def _by_block(self, rows: np.ndarray) -> list[tuple[int, slice]]:
        """Each block of ascending rows, and which of the rows it has."""
        blocks, starts = np.unique(rows // self.per_block, return_index=True)
        ends = np.append(starts[1:], len(rows))
        return [
            (int(block), slice(int(start), int(end)))
            for block, start, end in zip(blocks, starts, ends, strict=False)
        ]

    def _block(self, block: int) -> np.ndarray:
        """A block's records, float32 [n, width]."""
        begin = block * self.per_block
        count = min(self.per_block, self.count - begin)
        if not self.file.has(block):
            return self._draw(np.arange(begin, begin + count))
        data = np.frombuffer(self.file.read(block), dtype=np.float32)
        return data[: count * self.width].reshape(count, self.width)


def records_per_block(width: int) -> int:
    """Records of some floats in a block.

    >>> [records_per_block(width) for width in (17, 1024, 3000)]
    [60, 1, 1]
    """
    return max(1, PAGE_BYTES // (4 * width))


def held_of_blocks(count: int, width: int) -> int:
    """Bytes of memory that records in a file take: a place and a checksum for each block.

    >>> held_of_blocks(61, 17)
    24
    """
    return 12 * -(-count // records_per_block(width))


def pages_per_block(width: int) -> int:
    """Pages that a block needs for one record at least."""
    return max(1, -(-4 * width // PAGE_BYTES))
