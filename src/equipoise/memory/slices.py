"""Parts of tensors in blocks of a file, read and written in order by one thread.

Why
    What is fetched beside a computation must not wait for it, and what is written must be in the
    file before it is read again.

What it decides
    Each part has blocks of its own. One thread does everything in the order in which it was asked
    for, so a read sees every write before it, and memory that is freed after a write is free when
    the next read wants it.

Kept true (tests/unit/memory/test_slices.py)
    Parts come back bit for bit; bytes read and written are whole blocks; damage is an error of the
    fetch that meets it.
"""

import ctypes
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from equipoise.base.errors import CheckpointError
from equipoise.memory.blocks import PAGE_BYTES, BlockFile

_MOST_PAGES = 256
"""Pages of the largest block, 1 MiB: reads of that size reach what a disk gives."""

_Out = TypeVar("_Out")


def block_pages(size_bytes: int) -> int:
    """Pages of a block for parts of this size.

    >>> block_pages(1), block_pages(9000), block_pages(1 << 30)
    (1, 3, 256)
    """
    return max(1, min(_MOST_PAGES, -(-size_bytes // PAGE_BYTES)))


class SliceFile:
    """Parts by name; all are written before they are read."""

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Begin anew.

        Args:
            folder: Its own; it is made.
            sizes: Of each part [bytes].
        """
        pages = block_pages(min(sizes.values()))
        self.block_bytes = pages * PAGE_BYTES
        self._first: dict[str, int] = {}
        count = 0
        for name, size in sizes.items():
            self._first[name] = count
            count += -(-size // self.block_bytes)
        self._file = BlockFile(folder, count, pages)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slices")

    @property
    def read_bytes(self) -> int:
        """From the file, so far."""
        return self._file.blocks_read * self.block_bytes

    @property
    def written_bytes(self) -> int:
        """To the file, so far."""
        return self._file.blocks_written * self.block_bytes

    def of(self, size_bytes: int) -> int:
        """Bytes of the whole blocks of a part."""
        return -(-size_bytes // self.block_bytes) * self.block_bytes

    def run(self, work: Callable[[], _Out]) -> "Future[_Out]":
        """Do something in the thread, after what was asked for before."""
        return self._thread.submit(work)

    def close(self) -> None:
        """End the thread, then close the file."""
        self._thread.shutdown()
        self._file.close()

    # In the thread. ----------------------------------------------------------------------------

    def read(self, name: str, out: Tensor) -> None:
        """Fill a contiguous tensor with a part.

        Raises:
            CheckpointError: the part's bytes are not those that were written.
        """
        data = _memory(out)
        for at, start in enumerate(range(0, len(data), self.block_bytes)):
            size = min(self.block_bytes, len(data) - start)
            try:
                block = self._file.read(self._first[name] + at)
            except (CheckpointError, OSError) as error:
                raise CheckpointError(
                    f"{self._file.folder / 'blocks'}, where weights that have no memory lie, is "
                    "damaged. Start the run again: it goes on from its newest checkpoint."
                ) from error
            data[start : start + size] = block[:size]

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a contiguous tensor as a part.

        Raises:
            CheckpointError: the disk refuses it.
        """
        data = _memory(tensor)
        for at, start in enumerate(range(0, len(data), self.block_bytes)):
            block = bytes(data[start : start + self.block_bytes])
            self._file.write(self._first[name] + at, block.ljust(self.block_bytes, b"\0"))


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor; NumPy's view would keep its memory from being freed."""
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
