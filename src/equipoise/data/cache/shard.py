"""Read the documents of one shard of a corpus, independently of the others.

What it decides
    What a document is: a file, a line, a row. Empty documents are skipped. So are files that are
    not UTF-8, but only in the standard library, whose test suite ships a few on purpose.

Kept true (tests/unit/data/test_source.py)
    A shard reads the same after pickling.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from equipoise.base.errors import DataError
from equipoise.base.nearest import nearest
from equipoise.base.read import parse_json
from equipoise.data.chat.rows import (
    Row,
    RowError,
    columns_of,
    pick_columns,
    texts_of,
    without_nulls,
)
from equipoise.data.columns import ArrowFile, open_parquet


class Document(NamedTuple):
    """One document and its place.

    ``file`` is an index into ``Source.names``. ``row`` is the row of parquet and datasets, the
    byte at which the line starts for jsonl, and 0 if the file is the document. ``text`` is
    empty for an empty document, and None for a file that is not UTF-8 and may be skipped; of a
    conversation, it is the columns of its row.
    """

    file: int
    row: int
    text: str | Row | None


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
    """Parts of a corpus that one process reads in order."""

    kind: str
    root: Path
    column: str
    parts: tuple[Part, ...]
    format: str = "text"
    """``data.format``: what a row is."""

    @property
    def size_bytes(self) -> int:
        """Bytes on disk that are read for this shard [bytes]."""
        return sum(part.size_bytes for part in self.parts)

    def documents(self) -> Iterator[Document]:
        """Every document with its place, including empty and undecodable ones.

        Raises:
            DataError: a file is not of its kind; says where.
        """
        read = _READERS[self.kind]
        for part in self.parts:
            yield from read(self, part)

    def read(self) -> Iterator[str]:
        """The texts that count: neither empty nor undecodable."""
        for document in self.documents():
            if document.text:
                yield document.text if isinstance(document.text, str) else texts_of(document.text)

    def where(self, document: Document) -> str:
        """The place of a document, for an error: ``chat.jsonl:12``, ``chat.parquet row 11``."""
        name = next(part.name for part in self.parts if part.file == document.file)
        path = self.root / name
        if self.kind == "jsonl":
            return f"{path}:{_line_number(path, document.row)}"
        return f"{path} row {document.row:,}"

    def pick(self, row: Row, file: int, place: int) -> Row:
        """The columns of a conversation's row.

        Raises:
            DataError: it lacks one; says where.
        """
        try:
            return pick_columns(row, self.format, self.column)
        except RowError as error:
            raise DataError(f"{self.where(Document(file, place, None))} {error}") from None


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
            # A line belongs to the part that has its first byte.
            file.seek(part.start - 1)
            file.readline()
        offset = file.tell()
        while offset < part.stop:
            line = file.readline()
            if line.strip():
                row = _row_of_line(path, offset, line, shard.column)
                if shard.format == "text":
                    text: str | Row = _field_of_row(path, offset, row, shard.column)
                else:
                    text = shard.pick(row, part.file, offset)
                yield Document(part.file, offset, text)
            offset += len(line)


def _row_of_line(path: Path, offset: int, line: bytes, name: str) -> dict[str, Any]:
    try:
        row = parse_json(line.decode())
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error, offset) from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{_line_number(path, offset)} is not JSON: {error.msg} (column "
            f"{error.colno}). Correct the line or remove it."
        ) from None
    except ValueError as error:
        raise DataError(
            f"{path}:{_line_number(path, offset)} cannot be read: {error}. Correct the line or "
            "remove it."
        ) from None
    if not isinstance(row, dict):
        raise DataError(
            f"{path}:{_line_number(path, offset)} is a JSON {_json_kind(row)}, not an object. "
            f'Write each line as {{"{name}": "..."}}.'
        )
    return row


def _field_of_row(path: Path, offset: int, row: dict[str, Any], name: str) -> str:
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
        # JSON may escape half of a surrogate pair, which UTF-8 cannot encode.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_row_groups(shard: Shard, part: Part) -> Iterator[Document]:
    path = shard.root / part.name
    with open_parquet(path) as parquet:
        wanted = columns_of(shard.format, shard.column)
        names = [name for name in wanted if name in parquet.schema_arrow.names]
        batches = parquet.iter_batches(
            batch_size=1024, row_groups=list(range(part.start, part.stop)), columns=names
        )
        if shard.format == "text":
            yield from _rows(part, (batch.column(0) for batch in batches))
        else:
            yield from _talks(shard, part, batches)


def _read_batches(shard: Shard, part: Part) -> Iterator[Document]:
    with ArrowFile(shard.root / part.name) as arrow:
        batches = arrow.batches(part.start, part.stop)
        if shard.format == "text":
            index = arrow.schema.get_field_index(shard.column)
            yield from _rows(part, (batch.column(index) for batch in batches))
        else:
            names = [
                name
                for name in columns_of(shard.format, shard.column)
                if name in arrow.schema.names
            ]
            yield from _talks(shard, part, (batch.select(names) for batch in batches))


def _talks(shard: Shard, part: Part, batches: Iterable[Any]) -> Iterator[Document]:
    at = part.first_row
    for batch in batches:
        for row in batch.to_pylist():
            yield Document(part.file, at, shard.pick(without_nulls(row), part.file, at))
            at += 1


def _rows(part: Part, columns: Iterable[Any]) -> Iterator[Document]:
    row = part.first_row
    for column in columns:
        for text in column.to_pylist():
            yield Document(part.file, row, text or "")
            row += 1


def _not_utf8(path: Path, error: UnicodeDecodeError, offset: int) -> DataError:
    return DataError(
        f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset "
        f"{offset + error.start:,}. Convert the file to UTF-8 or move it out of data.path."
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


_READERS: dict[str, Callable[[Shard, Part], Iterator[Document]]] = {
    "python-stdlib": _read_stdlib,
    "text": _read_text,
    "jsonl": _read_lines,
    "parquet": _read_row_groups,
    "datasets": _read_batches,
}
