"""Find the documents of a corpus and read them, in shards that need nothing of each other.

Why
    Tokenizing is the one slow thing before the first step. It runs on every core if the
    corpus falls into parts that can be read alone, and it need not run at all if the
    corpus is known to be the one of yesterday.

What it decides
    Which files belong to a corpus and in which order; where a large file is divided; what
    a document is (a file, a line, a row); what the corpus' identity is. Empty documents
    are passed over. Of the standard library alone, files that are not UTF-8 are too: its
    test-suite ships a few on purpose.

Kept true (tests/unit/data/test_source.py)
    Every document is in exactly one shard, in the order of the files; a shard reads the
    same after pickling; two openings of an untouched corpus have one digest, and a file
    that changes its name, size or time of change has another. A file rewritten with the
    same size and the same time of change is not noticed: contents are not read for it.

Sources
    save_to_disk folders: datasets 2.x/3.x, arrow_dataset.py (state.json, ``_data_files``).
"""

import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from equipoise.base.digest import digest
from equipoise.base.errors import DataError
from equipoise.base.nearest import nearest
from equipoise.spec.run import DataSpec

# A shard is the unit of work of one process and of what a kill can lose: about 0.2 s of
# tokenizing for a small corpus, and few enough files for a large one.
_SHARD_BYTES_MIN = 512 << 10
_SHARD_BYTES_MAX = 64 << 20
_SHARDS_WANTED = 512

# What a tokenizer is trained on is read from this many shards, this much from each.
_SAMPLE_SHARDS = 64
_SAMPLE_SHARD_CHARS = 2 << 20

_SUFFIX = {
    "python-stdlib": ".py",
    "text": "",
    "jsonl": ".jsonl",
    "parquet": ".parquet",
    "datasets": ".arrow",
}
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


class Document(NamedTuple):
    """One document as it lies in its file.

    ``file`` counts ``Source.names``. ``row`` is the row of parquet and datasets, the byte
    at which the line starts for jsonl, and 0 where the file is the document. ``text`` is
    empty for an empty document, and None where the file is not UTF-8 and may be passed over.
    """

    file: int
    row: int
    text: str | None


@dataclass(frozen=True, slots=True)
class Part:
    """A run of one file: bytes [start, stop) of jsonl, row groups of parquet, batches of arrow."""

    file: int
    name: str
    start: int
    stop: int
    first_row: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Parts that one process reads, in order, without the rest of the corpus."""

    kind: str
    root: Path
    column: str
    parts: tuple[Part, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes on disk that are read for this shard [bytes]."""
        return sum(part.size_bytes for part in self.parts)

    def documents(self) -> Iterator[Document]:
        """Every document with its place, the empty and the undecodable ones included.

        Raises:
            DataError: a file is not what its kind promises; says where.
        """
        read = _READERS[self.kind]
        for part in self.parts:
            yield from read(self, part)

    def read(self) -> Iterator[str]:
        """The texts that count: neither empty nor undecodable."""
        for document in self.documents():
            if document.text:
                yield document.text


@dataclass(frozen=True)
class Source:
    """A corpus that was found but not yet read.

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

    @property
    def size_bytes(self) -> int:
        """Bytes of all files [bytes]."""
        return sum(self.sizes_bytes)

    @cached_property
    def documents(self) -> int:
        """How many documents count. Cost: reads the corpus once, then remembers."""
        return sum(1 for shard in self.shards() for _ in shard.read())

    def shards(self) -> list[Shard]:
        """The corpus in parts that can be read alone, in order; the same ones each time.

        Raises:
            DataError: a parquet or arrow file has no such column, or pyarrow is missing.
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
                    shards.append(Shard(self.kind, self.root, self.column, tuple(parts)))
                    parts, held_bytes = [], 0
        if parts:
            shards.append(Shard(self.kind, self.root, self.column, tuple(parts)))
        return shards

    def sample(self) -> Iterator[str]:
        """Texts from all over the corpus, to train a tokenizer on: at most 128 Mi characters.

        A corpus of up to 64 shards is given whole; of a larger one the first 2 Mi characters
        or so of 64 shards at equal distances.
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


class _Found(NamedTuple):
    name: str
    size_bytes: int
    changed_ns: int


def open_source(spec: DataSpec, base: Path) -> Source:
    """Find the corpus that run.toml names; reads names, sizes and times, no contents.

    Args:
        spec: The ``[data]`` table.
        base: Folder of run.toml, at which a relative ``data.path`` starts.

    Returns:
        The files in order of their relative paths. Of a ``text`` folder every file counts
        that is not hidden (its name, or a folder's, starts with a dot); of the other
        kinds those with the kind's suffix. Links to folders are not followed.

    Raises:
        DataError: the path is missing or not given, or holds no file of the kind.
    """
    if spec.source == "python-stdlib":
        if spec.path:
            raise DataError(
                f'data.path is "{spec.path}" but data.source is "python-stdlib", which reads no '
                'path. Set data.source to "text", "jsonl", "parquet" or "datasets", or remove '
                "data.path."
            )
        root = Path(sysconfig.get_path("stdlib"))
        name = f"python-stdlib {platform.python_version()}"
    else:
        if not spec.path:
            raise DataError(
                f'data.source = "{spec.source}" needs data.path, and it is empty. Set data.path '
                "to a file or folder; a relative one starts at the folder of run.toml."
            )
        root = base / Path(spec.path).expanduser()
        name = f"{spec.source}:{root.name}"
    if not root.exists():
        raise DataError(
            f"data.path {root} does not exist. Set data.path to a file or folder; a relative "
            f"one starts at {base}."
        )
    if spec.source == "datasets":
        found = _find_datasets(root)
    elif root.is_file():
        state = root.stat()
        found = [_Found(root.name, state.st_size, state.st_mtime_ns)]
        root = root.parent
    else:
        found = _find(root, spec.source)
    found.sort()
    column = "" if spec.source in ("python-stdlib", "text") else spec.field
    return Source(
        name=name,
        digest=digest([name, spec.source, column, found]),
        kind=spec.source,
        root=root,
        column=column,
        names=tuple(file.name for file in found),
        sizes_bytes=tuple(file.size_bytes for file in found),
    )


def _find(root: Path, kind: str) -> list[_Found]:
    suffix = _SUFFIX[kind]
    found = []
    others = 0
    folders = [("", root)]
    while folders:
        prefix, folder = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name in _NOT_STDLIB if kind == "python-stdlib" else entry.name[0] == ".":
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append((f"{prefix}{entry.name}/", Path(entry.path)))
                elif entry.is_file() and entry.name.endswith(suffix):
                    state = entry.stat()
                    found.append(
                        _Found(prefix + entry.name, state.st_size, state.st_mtime_ns),
                    )
                else:
                    others += 1
    if not found:
        wanted = f"*{suffix} file" if suffix else "file that is not hidden"
        raise DataError(
            f"data.path {root} holds no {wanted} (other files: {others:,}). Set data.path to "
            f'where the corpus is, or data.source to its kind; it is "{kind}" now.'
        )
    return found


def _find_datasets(root: Path) -> list[_Found]:
    if (root / "dataset_dict.json").is_file():
        splits = json.loads((root / "dataset_dict.json").read_text())["splits"]
        raise DataError(
            f"data.path {root} holds {len(splits)} datasets ({', '.join(splits)}), and a corpus "
            f"is one. Set data.path to {root / splits[0]}, for example."
        )
    if (root / "state.json").is_file():
        state = json.loads((root / "state.json").read_text())
        names = [str(file["filename"]) for file in state["_data_files"]]
        if state.get("_indices_data_files"):
            raise DataError(
                f"data.path {root} keeps its order of rows in "
                f"{len(state['_indices_data_files'])} files of indices, which are not read. "
                "Call flatten_indices() on the dataset and save it again."
            )
    elif (root / "dataset_info.json").is_file():
        # A folder of the datasets cache has the same files and no state.json.
        names = [path.name for path in root.glob("*.arrow")]
    else:
        raise DataError(
            f"data.path {root} is no save_to_disk folder: it has neither state.json nor "
            "dataset_info.json. Set data.path to the folder that save_to_disk wrote."
        )
    missing = [name for name in names if not (root / name).is_file()]
    if missing or not names:
        raise DataError(
            f"data.path {root} has {len(names) - len(missing)} of the {len(names)} arrow files "
            "that it should have"
            + (f"; the first that is missing is {missing[0]}" if missing else "")
            + ". Save the dataset again with save_to_disk."
        )
    states = [(name, (root / name).stat()) for name in names]
    return [_Found(name, state.st_size, state.st_mtime_ns) for name, state in states]


# Where a file is divided. -----------------------------------------------------------------


def _split_nowhere(source: Source, file: int, wanted_bytes: int) -> Iterator[Part]:  # noqa: ARG001
    size_bytes = source.sizes_bytes[file]
    yield Part(file, source.names[file], 0, size_bytes, 0, size_bytes)


def _split_bytes(source: Source, file: int, wanted_bytes: int) -> Iterator[Part]:
    size_bytes = source.sizes_bytes[file]
    for start in range(0, size_bytes, wanted_bytes):
        stop = min(start + wanted_bytes, size_bytes)
        yield Part(file, source.names[file], start, stop, 0, stop - start)


def _split_row_groups(source: Source, file: int, wanted_bytes: int) -> Iterator[Part]:
    path = source.root / source.names[file]
    with _open_parquet(path) as parquet:
        _check_column(path, parquet.schema_arrow, source.column)
        groups = [parquet.metadata.row_group(index) for index in range(parquet.num_row_groups)]
        sizes = [(group.num_rows, group.total_byte_size) for group in groups]
    yield from _runs(file, source.names[file], sizes, wanted_bytes)


def _split_batches(source: Source, file: int, wanted_bytes: int) -> Iterator[Part]:
    path = source.root / source.names[file]
    with _ArrowFile(path) as arrow:
        _check_column(path, arrow.schema, source.column)
        index = arrow.schema.get_field_index(source.column)
        sizes = [(batch.num_rows, batch.column(index).nbytes) for batch in arrow.batches()]
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


# How a part is read. ----------------------------------------------------------------------


def _read_stdlib(shard: Shard, part: Part) -> Iterator[Document]:
    try:
        yield Document(part.file, 0, (shard.root / part.name).read_bytes().decode())
    except UnicodeDecodeError:
        yield Document(part.file, 0, None)


def _read_text(shard: Shard, part: Part) -> Iterator[Document]:
    path = shard.root / part.name
    data = path.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error, 0) from None
    yield Document(part.file, 0, text)


def _read_lines(shard: Shard, part: Part) -> Iterator[Document]:
    path = shard.root / part.name
    with path.open("rb") as file:
        if part.start:
            # A line belongs to the part in which its first byte lies.
            file.seek(part.start - 1)
            file.readline()
        offset = file.tell()
        while offset < part.stop:
            line = file.readline()
            if line.strip():
                yield Document(part.file, offset, _field_of_line(path, offset, line, shard.column))
            offset += len(line)


def _field_of_line(path: Path, offset: int, line: bytes, name: str) -> str:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error, offset) from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{_line_number(path, offset)} is not JSON: {error.msg} (column "
            f"{error.colno}). Mend the line or remove it."
        ) from None
    if not isinstance(row, dict):
        raise DataError(
            f"{path}:{_line_number(path, offset)} is a JSON {_json_kind(row)}, not an object. "
            f'Write each line as {{"{name}": "..."}}.'
        )
    if name not in row:
        hint = f'Nearest: "{nearest(name, row)}". ' if row else ""
        raise DataError(
            f'{path}:{_line_number(path, offset)} has no field "{name}" among its {len(row)} '
            f"({', '.join(row)}). {hint}Set data.field to the field that holds the text."
        )
    text = row[name]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(
            f'{path}:{_line_number(path, offset)} has a JSON {_json_kind(text)} in field "{name}", '
            "not text. Set data.field to the field that holds the text."
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        # JSON may escape half of a surrogate pair, which no UTF-8 text can hold.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_row_groups(shard: Shard, part: Part) -> Iterator[Document]:
    path = shard.root / part.name
    with _open_parquet(path) as parquet:
        batches = parquet.iter_batches(
            batch_size=1024, row_groups=list(range(part.start, part.stop)), columns=[shard.column]
        )
        yield from _rows(part, (batch.column(0) for batch in batches))


def _read_batches(shard: Shard, part: Part) -> Iterator[Document]:
    with _ArrowFile(shard.root / part.name) as arrow:
        index = arrow.schema.get_field_index(shard.column)
        batches = arrow.batches(part.start, part.stop)
        yield from _rows(part, (batch.column(index) for batch in batches))


def _rows(part: Part, columns: Iterable[Any]) -> Iterator[Document]:
    row = part.first_row
    for column in columns:
        for text in column.to_pylist():
            yield Document(part.file, row, text or "")
            row += 1


def _not_utf8(path: Path, error: UnicodeDecodeError, offset: int) -> DataError:
    return DataError(
        f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset "
        f"{offset + error.start:,}. Convert the file to UTF-8, or move it out of data.path."
    )


def _line_number(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        line = 1
        while offset > 0 and (data := file.read(min(offset, 1 << 20))):
            line += data.count(b"\n")
            offset -= len(data)
    return line


def _json_kind(value: object) -> str:
    kinds = {list: "list", dict: "object", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


# Arrow. -----------------------------------------------------------------------------------


def _pyarrow(path: Path) -> Any:
    """Import pyarrow, 0.3 s, only for those who read its files."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{path} is read with pyarrow, which is not installed. Run: "
            "pip install 'equipoise[parquet]'"
        ) from None
    return pyarrow


def _open_parquet(path: Path) -> Any:
    pyarrow = _pyarrow(path)
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(
            f"{path} is not a parquet file: {error} Write the file again, or move it out of "
            "data.path."
        ) from None


def _check_column(path: Path, schema: Any, name: str) -> None:
    columns = list(schema.names)
    if name not in columns:
        raise DataError(
            f'{path} has no column "{name}" among its {len(columns)} ({", ".join(columns)}). '
            f'Nearest: "{nearest(name, columns)}". Set data.field to the column that holds the '
            "text."
        )
    kind = str(schema.field(name).type)
    if kind not in ("string", "large_string", "string_view"):
        raise DataError(
            f'{path} has {kind} in column "{name}", not text. Set data.field to the column that '
            f"holds the text; the columns are {', '.join(columns)}."
        )


class _ArrowFile:
    """One arrow IPC file of either format: datasets writes streams, others write files."""

    def __init__(self, path: Path) -> None:
        pyarrow = _pyarrow(path)
        self._map = pyarrow.memory_map(str(path))
        try:
            if self._map.read(6) == b"ARROW1":
                self._file = pyarrow.ipc.open_file(self._map)
                self._stream = None
                self.schema = self._file.schema
            else:
                self._map.seek(0)
                self._stream = pyarrow.ipc.open_stream(self._map)
                self.schema = self._stream.schema
        except pyarrow.ArrowInvalid as error:
            self._map.close()
            raise DataError(
                f"{path} is not an arrow IPC stream or file: {error}. Save the dataset again "
                "with save_to_disk."
            ) from None

    def __enter__(self) -> "_ArrowFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """Record batches [start, stop); memory-mapped, so that passing over one is free."""
        if self._stream is None:
            for index in range(start, self._file.num_record_batches if stop is None else stop):
                yield self._file.get_batch(index)
            return
        for index, batch in enumerate(self._stream):
            if index == stop:
                return
            if index >= start:
                yield batch


_SPLITTERS: dict[str, Callable[[Source, int, int], Iterator[Part]]] = {
    "python-stdlib": _split_nowhere,
    "text": _split_nowhere,
    "jsonl": _split_bytes,
    "parquet": _split_row_groups,
    "datasets": _split_batches,
}
_READERS: dict[str, Callable[[Shard, Part], Iterator[Document]]] = {
    "python-stdlib": _read_stdlib,
    "text": _read_text,
    "jsonl": _read_lines,
    "parquet": _read_row_groups,
    "datasets": _read_batches,
}
