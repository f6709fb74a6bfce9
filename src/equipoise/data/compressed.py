"""Open files of a corpus, plain or compressed: gzip, xz or Zstandard.

What it decides
    A file is compressed if its first bytes say so, whatever its name: none of the three magic
    numbers can begin UTF-8 text or a Parquet file. A name that promises a compression that the
    bytes do not have is refused.

Kept true (tests/unit/data/test_compressed.py)
    A file that is cut or changed anywhere raises one ``DataError``; no read holds more than
    128 MiB, however far the data expands.

Sources
    Magic numbers: RFC 1952, section 2.3.1; the .xz file format 1.2, section 2.1.1.1; RFC 8878,
    section 3.1.1. A Zstandard block of 4 bytes may expand to 128 KiB (RFC 8878, section 3.1.1.2).
"""

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from equipoise.base.errors import DataError

_MAGIC = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\x00", ".zst": b"\x28\xb5\x2f\xfd"}

SUFFIXES = tuple(_MAGIC)
"""Endings of the names of compressed files."""

_ZSTD_BYTES = 4096
"""Bytes of a Zstandard file that are decompressed at once: at most 128 MiB of data."""
_BUFFER_BYTES = 1 << 20


def compression_of(path: Path) -> str:
    """How a file is compressed: ``.gz``, ``.xz``, ``.zst``, or empty if it is not.

    Raises:
        DataError: its name says that it is, but its first bytes are others.
    """
    with path.open("rb") as file:
        head = file.read(max(map(len, _MAGIC.values())))
    for suffix, magic in _MAGIC.items():
        if head.startswith(magic):
            return suffix
    if path.suffix in _MAGIC:
        wanted = _MAGIC[path.suffix][:4].hex(" ")
        begins = (
            f"it begins with {head[:4].hex(' ')} instead of {wanted}" if head else "it is empty"
        )
        raise DataError(
            f"{path} is not {_NAMES[path.suffix]} data: {begins}. Compress it again, or rename it "
            "if it is plain."
        )
    return ""


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed while they are read.

    Raises:
        DataError: the compressed data are cut or damaged (when that part is read), the name
            promises another compression, or zstandard is not installed.
    """
    compression = compression_of(path)
    with path.open("rb") as file:
        if not compression:
            yield file
            return
        raw = _Translated(_OPENERS[compression](file, path), path, compression)
        yield cast(BinaryIO, io.BufferedReader(raw, _BUFFER_BYTES))


class _Translated(io.RawIOBase):
    """A decompressing stream whose errors name the file."""

    def __init__(self, stream: Any, path: Path, compression: str) -> None:
        self._stream, self._path, self._compression = stream, path, compression

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, ValueError) as error:
            said = "it ends in the middle" if isinstance(error, EOFError) else str(error)
            raise DataError(
                f"{self._path} is damaged {_NAMES[self._compression]} data: "
                f"{said.strip().rstrip('.')}. Copy or compress it again."
            ) from None
        buffer[: len(data)] = data
        return len(data)


class _Zstandard:
    """Frames one after another; the library itself takes a cut file for a short one."""

    def __init__(self, file: BinaryIO, make: Callable[[], Any], fault: type[Exception]) -> None:
        self._file, self._make, self._fault = file, make, fault
        self._frame: Any = None
        self._held = memoryview(b"")

    def read(self, size: int) -> memoryview:
        while not self._held:
            data = self._file.read(_ZSTD_BYTES)
            if not data:
                if self._frame is not None:
                    raise EOFError
                break
            self._held = memoryview(self._decompress(data))
        part, self._held = self._held[:size], self._held[size:]
        return part

    def _decompress(self, data: bytes) -> bytes:
        parts = []
        while data:
            self._frame = self._frame or self._make()
            try:
                parts.append(self._frame.decompress(data))
            except self._fault as error:
                raise ValueError(str(error)) from None
            data = b""
            if self._frame.eof:
                data, self._frame = self._frame.unused_data, None
        return b"".join(parts)


def _open_gzip(file: BinaryIO, path: Path) -> Any:
    del path
    return gzip.GzipFile(fileobj=file)


def _open_xz(file: BinaryIO, path: Path) -> Any:
    del path
    return lzma.LZMAFile(file)


def _open_zstandard(file: BinaryIO, path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise DataError(
            f"Reading {path} needs zstandard, which is not installed. Run: "
            "pip install 'equipoise[zstd]'"
        ) from None
    return _Zstandard(
        file, lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError
    )


_NAMES = {".gz": "gzip", ".xz": "xz", ".zst": "Zstandard"}
_OPENERS: dict[str, Callable[[BinaryIO, Path], Any]] = {
    ".gz": _open_gzip,
    ".xz": _open_xz,
    ".zst": _open_zstandard,
}
