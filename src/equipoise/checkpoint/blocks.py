"""Sums of a file's blocks: damage is found while a block is read, and where it is.

Why
    One digest of a whole file is known only after its last byte, so a file would be read twice:
    once to be verified and once to be used. A sum for every block is verified as it is read.

What it decides
    A block has 4 MiB, the last one of a file less. Its sum is XXH3 with 128 bits: 20 times as fast
    as BLAKE2b, and of two damaged blocks in 2**128 one goes unnoticed. It guards against
    accidents, not against forgers.

Kept true (tests/unit/checkpoint/test_blocks.py)
    A byte changed anywhere is noticed by the read of its block, and by no other.

Sources
    XXH3: github.com/Cyan4973/xxHash.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Self

import xxhash

from equipoise.base.digest import digest_bytes

BLOCK_BYTES = 4 << 20
"""Bytes of a block; part of the checkpoints' format."""


class DamagedBlockError(Exception):
    """Bytes ``[start, stop)`` of a file are not those that were written."""

    def __init__(self, file: str, start: int, stop: int) -> None:
        super().__init__(f"bytes {start:,} to {stop:,} of {file} have changed")
        self.file, self.start, self.stop = file, start, stop


def sum_block(data: bytes | bytearray | memoryview) -> str:
    """The 32-digit sum of a block.

    >>> sum_block(b"equipoise")
    '0996ee2934f2de66732a6ac30b1830dc'
    """
    return xxhash.xxh3_128_hexdigest(data)


def digest_sums(sums: Sequence[str]) -> str:
    """The digest of a file by the sums of its blocks."""
    return digest_bytes("".join(sums).encode())


def blocks(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and end of each block of a file.

    >>> list(blocks(BLOCK_BYTES + 1))
    [(0, 4194304), (4194304, 4194305)]
    """
    for start in range(0, size_bytes, BLOCK_BYTES):
        yield start, min(start + BLOCK_BYTES, size_bytes)


def read_whole(file: FileIO, size_bytes: int) -> bytes:
    """The next bytes of a file, fewer only at its end."""
    parts, left = [], size_bytes
    while left and (part := file.read(left)):
        parts.append(part)
        left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(frozen=True, slots=True)
class SummedFile:
    """A file as it was written: its size, and the sum of each of its blocks."""

    size_bytes: int
    sums: tuple[str, ...]


class BlockReader:
    """Reads and verifies blocks of a file.

    Args:
        path: The file.
        summed: What was written to it.
    """

    def __init__(self, path: Path, summed: SummedFile) -> None:
        self._name, self._summed = path.name, summed
        self._file = path.open("rb", buffering=0)

    def read(self, number: int) -> memoryview:
        """A block's bytes.

        Raises:
            DamagedBlockError: it has changed, or the file is shorter.
        """
        start = number * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self._summed.size_bytes)
        self._file.seek(start)
        data = read_whole(self._file, max(0, stop - start))
        sums = self._summed.sums
        if number >= len(sums) or sum_block(data) != sums[number]:
            raise DamagedBlockError(self._name, start, stop)
        return memoryview(data)

    def verify(self) -> None:
        """Verify every block.

        Raises:
            DamagedBlockError: one was changed.
        """
        for number in range(len(self._summed.sums)):
            self.read(number)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
