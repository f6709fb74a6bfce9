"""Tokens on disk, read so that no byte is used before it is verified.

Why
    Disks fail, and people copy, cut and swap files. A memory map may change after it was checked,
    and a wrong token trains without a warning.

What it decides
    The file consists of chunks, and a table beside it has the digest of each::

        tokens.bin        chunk 0 | chunk 1 | ... | last chunk, which may be shorter
        tokens.digests       16 B |    16 B | ... |    16 B

    A read copies the chunks that it touches, verifies the copy, and takes its tokens from the copy.
    Nothing is remembered as verified, and nothing is mapped: if a file is cut or changed during
    a run, the run ends with an error.

Kept true (tests/unit/data/cache/test_verified.py)
    A read detects any changed bit in the chunks that it touches, and in the table.
"""

import hashlib
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.base.errors import DataError

CHUNK_BYTES = 16 << 10
"""A short document costs one chunk, 20 us of BLAKE2b; the table is 1/1000 of the file."""

_DIGEST_BYTES = 16


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def damaged(file: Path, what: str) -> DataError:
    """The error for a cache's file that has changed since it was written."""
    return DataError(
        f"{file} is damaged: {what}. Delete the folder {file.parent}; the next run makes it again."
    )


def unreadable(folder: Path, error: OSError) -> DataError:
    """The error for a cache that cannot be read, because of its disk or its permissions."""
    return DataError(
        f"{folder} cannot be read ({error.strerror}). Make its files readable, or delete the "
        "folder; the next run makes it again."
    )


class ChunkTable:
    """The table of digests of a file that is being written.

    >>> table = ChunkTable()
    >>> table.update(b"abc")
    >>> len(table.finish())
    16
    """

    def __init__(self) -> None:
        self._table = bytearray()
        self._held = bytearray()

    def update(self, data: bytes) -> None:
        """Add the next bytes of the file, any number of them."""
        self._held += data
        whole = len(self._held) - len(self._held) % CHUNK_BYTES
        with memoryview(self._held) as held:
            for at in range(0, whole, CHUNK_BYTES):
                self._table += _digest(held[at : at + CHUNK_BYTES])
        del self._held[:whole]

    def finish(self) -> bytes:
        """The whole table, once all bytes of the file have been added."""
        if self._held:
            self._table += _digest(bytes(self._held))
            self._held.clear()
        return bytes(self._table)


class VerifiedTokens:
    """A file of tokens that is read in slices, each one verified whenever it is read.

    Args:
        file: Written under a ``ChunkTable``.
        dtype: Dtype of a token.
        count: Number of tokens in the file.
        table: Digests of its chunks, which the caller has verified.

    Raises:
        DataError: the file is missing, or its length does not match its tokens or its table.
    """

    def __init__(self, file: Path, dtype: "np.dtype[Any]", count: int, table: bytes) -> None:
        self.dtype = dtype
        self._file, self._count, self._table = file, count, table
        size_bytes = count * dtype.itemsize
        held_bytes = file.stat().st_size if file.is_file() else 0
        if held_bytes != size_bytes:
            raise damaged(file, f"it has {held_bytes:,} bytes where meta.json says {size_bytes:,}")
        if len(table) != -(-size_bytes // CHUNK_BYTES) * _DIGEST_BYTES:
            raise damaged(file, "its table of digests has a different number of chunks")
        try:
            self._handle = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise unreadable(file.parent, error) from None
        weakref.finalize(self, os.close, self._handle)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, span: slice) -> NDArray[np.unsignedinteger[Any]]:
        """Tokens of a slice without a step.

        Raises:
            DataError: a chunk of it has changed since it was written; says which bytes.
        """
        first, stop, _ = span.indices(self._count)
        if first >= stop:
            return np.empty(0, self.dtype)
        size = self.dtype.itemsize
        chunk = first * size // CHUNK_BYTES
        data = self._read(chunk, -(-stop * size // CHUNK_BYTES))
        return np.frombuffer(data, self.dtype, stop - first, first * size - chunk * CHUNK_BYTES)

    def _read(self, first: int, stop: int) -> bytes:
        """The bytes of chunks [first, stop), verified."""
        begin = first * CHUNK_BYTES
        end = min(stop * CHUNK_BYTES, self._count * self.dtype.itemsize)
        parts = []
        at = begin
        try:
            while at < end and (part := os.pread(self._handle, end - at, at)):
                parts.append(part)
                at += len(part)
        except OSError as error:
            raise damaged(self._file, f"byte {at:,} cannot be read ({error.strerror})") from None
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        with memoryview(data) as view:
            for chunk in range(first, stop):
                low = chunk * CHUNK_BYTES - begin
                known = self._table[chunk * _DIGEST_BYTES : (chunk + 1) * _DIGEST_BYTES]
                if _digest(view[low : low + CHUNK_BYTES]) != known:
                    raise damaged(
                        self._file,
                        f"bytes {begin + low:,} to {min(begin + low + CHUNK_BYTES, end):,} are "
                        "not as they were written",
                    )
        return data
