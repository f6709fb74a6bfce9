"""Find the documents of a corpus, in shards that are independent of each other.

Why
    Tokenizing is the only slow step before training. It runs on every core if the corpus
    divides into parts that can be read separately, and not at all if the corpus is known to be
    unchanged.

What it decides
    In which order files are read, where a large one is divided, and what the corpus's identity
    is. ``data.corpus_files`` finds the files, ``data.cache.shard`` reads them.

Kept true (tests/unit/data/test_source.py)
    Every document is in exactly one shard, in the order of the files; a shard reads the
    same after pickling; an untouched corpus always has the same digest, and a file with a new
    name, size or time of change gives another. A file rewritten with the same size and time of
    change goes unnoticed, because contents are not read for the digest.
"""

import os
import platform
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from equipoise.base.digest import digest
from equipoise.base.errors import DataError
from equipoise.base.read import user_path
from equipoise.data.cache.shard import Part, Shard
from equipoise.data.chat.rows import columns_of, read_columns
from equipoise.data.columns import ArrowFile, check_rows, field_of, open_parquet
from equipoise.data.compressed import compression_of
from equipoise.data.corpus_files import CorpusFile, find_datasets, find_files
from equipoise.spec.run.spec import PYTHON_SOURCES, DataSpec

# A shard is the unit of work of one process and of what a kill can lose: about 0.2 s of
# tokenizing for a small corpus, and few enough files for a large one.
_SHARD_BYTES_MIN = 512 << 10
_SHARD_BYTES_MAX = 64 << 20
_SHARDS_WANTED = 512
# Where a compressed file ends is known when it has been read.
_TO_ITS_END = 1 << 62
# A tokenizer is trained on texts of this many shards, this much from each.
_SAMPLE_SHARDS = 64
_SAMPLE_SHARD_CHARS = 2 << 20


@dataclass(frozen=True)
class Source:
    """A corpus that has not been read yet.

    ``names`` are the files' paths relative to ``root``, in the order of reading;
    ``digest`` names the corpus: kind, column, files' names, sizes and times of change.
    """

    name: str
    digest: str
    kind: str
    root: Path
    column: str
    names: tuple[str, ...]
    sizes_bytes: tuple[int, ...] = field(repr=False)
    format: str = "text"

    @property
    def size_bytes(self) -> int:
        """Bytes of all files [bytes]."""
        return sum(self.sizes_bytes)

    @cached_property
    def documents(self) -> int:
        """The number of documents. Cost: the first call reads the corpus."""
        return sum(1 for shard in self.shards() for _ in shard.read())

    def shards(self) -> list[Shard]:
        """The corpus in parts that can be read separately, in order; the same each time.

        Raises:
            DataError: a parquet or arrow file lacks the column, or pyarrow is missing.
        """
        wanted_bytes = min(
            max(self.size_bytes // _SHARDS_WANTED, _SHARD_BYTES_MIN), _SHARD_BYTES_MAX
        )
        split = _SPLITTERS[self.kind]
        shards: list[Shard] = []
        parts: list[Part] = []
        held_bytes = 0
        for file in range(len(self.names)):
            for part in split(self, file, wanted_bytes):
                parts.append(part)
                held_bytes += part.size_bytes
                if held_bytes >= wanted_bytes:
                    shards.append(self._shard(parts))
                    parts, held_bytes = [], 0
        if parts:
            shards.append(self._shard(parts))
        return shards

    def _shard(self, parts: Iterable[Part]) -> Shard:
        return Shard(self.kind, self.root, self.column, tuple(parts), self.format)

    def sample(self) -> Iterator[str]:
        """Texts from all over the corpus, to train a tokenizer on: at most 128 Mi characters.

        All of a corpus of up to 64 shards; of a larger one, the first 2 Mi characters or so of
        64 evenly spaced shards.
        """
        shards = self.shards()
        count = min(len(shards), _SAMPLE_SHARDS)
        for turn in range(count):
            chars = 0
            for text in shards[turn * len(shards) // count].read():
                yield text
                chars += len(text)
                if chars >= _SAMPLE_SHARD_CHARS:
                    break


def open_source(spec: DataSpec, base: Path) -> Source:
    """Find the corpus that run.toml names; reads names, sizes and times, no contents.

    Args:
        spec: The ``[data]`` table.
        base: Folder of run.toml, where a relative ``data.path`` starts.

    Returns:
        The files in order of their relative paths. In a ``text`` folder that is every file that
        is not hidden (its name, or a folder's, starts with a dot); for the other kinds, the
        files with the kind's suffix, also compressed. Links to folders are not followed. Of a
        file that stands beside its compressed copy, only the plain one is read.

    Raises:
        DataError: the path is missing or not given, or holds no file of the kind.
    """
    if spec.format != "text" and spec.source in (*PYTHON_SOURCES, "text"):
        raise DataError(
            f'data.format = "{spec.format}" needs rows with columns, but data.source is '
            f'"{spec.source}". Set data.source to "jsonl", "parquet" or "datasets".'
        )
    if spec.source in PYTHON_SOURCES:
        if spec.path:
            raise DataError(
                f'data.path is "{spec.path}" but data.source is "{spec.source}", which reads no '
                'path. Set data.source to "text", "jsonl", "parquet" or "datasets", or remove '
                "data.path."
            )
        root = Path(sysconfig.get_path("stdlib"))
        name = f"{spec.source} {platform.python_version()}"
    else:
        if not spec.path:
            raise DataError(
                f'data.source = "{spec.source}" needs data.path, but it is empty. Set data.path '
                "to a file or folder; a relative one starts at the folder of run.toml."
            )
        root = base / user_path(spec.path)
        name = f"{spec.source}:{root.name}"
    _require_readable(root, base)
    if spec.source == "datasets":
        files = find_datasets(root)
    elif root.is_file():
        state = root.stat()
        files = [CorpusFile(root.name, state.st_size, state.st_mtime_ns)]
        root = root.parent
    else:
        files = find_files(root, spec.source)
    files.sort()
    column = "" if spec.source in (*PYTHON_SOURCES, "text") else spec.field
    return Source(
        name=name,
        digest=digest([name, spec.source, column, files]),
        kind=spec.source,
        root=root,
        column=column,
        names=tuple(file.name for file in files),
        sizes_bytes=tuple(file.size_bytes for file in files),
        format=spec.format,
    )


def _require_readable(root: Path, base: Path) -> None:
    """Refuse what is neither a file nor a folder that can be read.

    Raises:
        DataError: it is missing, a pipe, a device or a loop of links, or closed to this user.
    """
    fix = f"Set data.path to a file or folder; a relative one starts at {base}."
    try:
        mode = root.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"data.path {root} does not exist. {fix}") from None
    except (OSError, ValueError) as error:
        words = (getattr(error, "strerror", None) or str(error)).lower()
        raise DataError(f"data.path {root} cannot be read ({words}). {fix}") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        what = next(words for is_kind, words in _NOT_FILES if is_kind(mode))
        raise DataError(f"data.path {root} is {what}, not a file or folder. {fix}")
    if not os.access(root, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        raise DataError(f"data.path {root} cannot be read (permission denied). {fix}")


_NOT_FILES: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (lambda _: True, "a device"),
)


def _split_nowhere(source: Source, file: int, wanted_bytes: int) -> Iterator[Part]:  # noqa: ARG001
    size_bytes = source.sizes_bytes[file]
    yield Part(file, source.names[file], 0, size_bytes, 0, size_bytes)


def _split_bytes(source: Source, file: int, wanted_bytes: int) -> Iterator[Part]:
    size_bytes = source.sizes_bytes[file]
    if compression_of(source.root / source.names[file]):
        yield Part(file, source.names[file], 0, _TO_ITS_END, 0, size_bytes)
        return
    for start in range(0, size_bytes, wanted_bytes):
        stop = min(start + wanted_bytes, size_bytes)
        yield Part(file, source.names[file], start, stop, 0, stop - start)


def _split_row_groups(source: Source, file: int, wanted_bytes: int) -> Iterator[Part]:
    path = source.root / source.names[file]
    with open_parquet(path) as parquet:
        _check_columns(source, path, parquet.schema_arrow)
        groups = [parquet.metadata.row_group(index) for index in range(parquet.num_row_groups)]
        sizes = [(group.num_rows, group.total_byte_size) for group in groups]
    if compression_of(path):  # each part decompresses the whole file
        wanted_bytes = _TO_ITS_END
    yield from _runs(file, source.names[file], sizes, wanted_bytes)


def _check_columns(source: Source, path: Path, schema: Any) -> list[str]:
    """Refuse a file without the columns that are read; which of its columns these are."""
    if source.format == "text":
        return [field_of(path, schema, source.column)[0]]
    wanted = columns_of(source.format, source.column)[:-1]
    check_rows(path, schema, wanted, is_whole=source.format == "prompt-completion")
    return read_columns(source.format, source.column, schema.names)


def _split_batches(source: Source, file: int, wanted_bytes: int) -> Iterator[Part]:
    path = source.root / source.names[file]
    with ArrowFile(path) as arrow:
        names = _check_columns(source, path, arrow.schema)
        sizes = [(batch.num_rows, batch.select(names).nbytes) for batch in arrow.batches()]
    yield from _runs(file, source.names[file], sizes, wanted_bytes)


def _runs(
    file: int, name: str, sizes: Iterable[tuple[int, int]], wanted_bytes: int
) -> Iterator[Part]:
    """Divide consecutive (rows, bytes) into parts of about the wanted bytes."""
    start = first_row = row = held_bytes = stop = 0
    for stop, (rows, size_bytes) in enumerate(sizes, start=1):
        row += rows
        held_bytes += size_bytes
        if held_bytes >= wanted_bytes:
            yield Part(file, name, start, stop, first_row, held_bytes)
            start, first_row, held_bytes = stop, row, 0
    if start < stop:
        yield Part(file, name, start, stop, first_row, held_bytes)


_SPLITTERS: dict[str, Callable[[Source, int, int], Iterator[Part]]] = {
    "python-stdlib": _split_nowhere,
    "python-functions": _split_nowhere,
    "text": _split_nowhere,
    "jsonl": _split_bytes,
    "parquet": _split_row_groups,
    "datasets": _split_batches,
}
