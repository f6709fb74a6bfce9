"""Read the documents of one shard of a corpus, independently of the others.

What it decides
    What a document is: a file, a line, a row. Empty documents are skipped. So are files that are
    not UTF-8, but only in the standard library, whose test suite ships a few on purpose. A mark
    of byte order at the beginning of a file is not part of its text.

Kept true (tests/unit/data/test_source.py)
    A shard reads the same after pickling; a text file of any size is read in blocks.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from equipoise.base.errors import DataError
from equipoise.base.read import parse_json
from equipoise.data.cache.long_line import LongString, parse_long_line, read_line, skip_line
from equipoise.data.chat.rows import (
    PARTS,
    Row,
    RowError,
    pick_columns,
    read_columns,
    texts_of,
    without_nulls,
)
from equipoise.data.columns import ArrowFile, column_of, field_of, open_parquet, rows_at_once
from equipoise.data.compressed import SUFFIXES, open_plain
from equipoise.data.fields import MissingFieldError, walk
from equipoise.data.functions import split_module
from equipoise.data.modality.rows import pick_parts

_BLOCK_BYTES = 16 << 20
"""Longer text files are read in blocks. One block has more characters than a tokenizer's training
takes from a shard."""


class Document(NamedTuple):
    """One document and its place.

    ``file`` is an index into ``Source.names``. ``row`` is the row of parquet and datasets, the
    byte at which the line starts for jsonl, a function's first line, and 0 if the file is the
    document. ``text`` is empty for an empty document, and None for a file that is not UTF-8 and may
    be skipped. A long text comes in consecutive blocks, which must be read before the next
    document. Of a conversation, it is the columns of its row.
    """

    file: int
    row: int
    text: str | Iterator[str] | Row | None

    @property
    def blocks(self) -> Iterator[str]:
        """The text in blocks; one unless it is long."""
        if isinstance(self.text, str | None):
            return iter((self.text or "",))
        return iter((texts_of(self.text),)) if isinstance(self.text, Mapping) else self.text


@dataclass(frozen=True, slots=True)
class Part:
    """A run of one file: bytes [start, stop) of jsonl, row groups of parquet, batches of arrow.

    A compressed file is one part, whose ``stop`` is beyond its data.
    """

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
        """The texts that count, neither empty nor undecodable; of a long one the first block."""
        for document in self.documents():
            if document.text:
                yield next(document.blocks)

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
            if self.format == PARTS:
                name = next(part.name for part in self.parts if part.file == file)
                return pick_parts(row, self.column, (self.root / name).parent)
            return pick_columns(row, self.format, self.column)
        except RowError as error:
            raise DataError(f"{self.where(Document(file, place, None))} {error}") from None


def _read_stdlib(shard: Shard, part: Part) -> Iterator[Document]:
    try:
        yield Document(part.file, 0, (shard.root / part.name).read_bytes().decode())
    except UnicodeDecodeError:
        yield Document(part.file, 0, None)


def _read_functions(shard: Shard, part: Part) -> Iterator[Document]:
    for document in _read_stdlib(shard, part):
        if document.text is None:
            yield document
            continue
        for line, text in split_module("".join(document.text)):
            yield Document(part.file, line, text)


def _read_text(shard: Shard, part: Part) -> Iterator[Document]:
    # Pseudo-files of the kernel have no size; some of them never end.
    is_read = part.size_bytes or part.name.endswith(SUFFIXES)
    blocks = _text_blocks(shard.root / part.name) if is_read else iter(())
    first, second = next(blocks, ""), next(blocks, "")
    text = chain((first, second), blocks) if second else first
    yield Document(part.file, 0, text)


def _text_blocks(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    with open_plain(path) as file:
        while True:
            data = file.read(_BLOCK_BYTES)
            begin = offset - len(decoder.getstate()[0])
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, error, begin) from None
            yield text if offset else text.removeprefix("\ufeff")
            offset += len(data)
            if not data:
                return


def _read_lines(shard: Shard, part: Part) -> Iterator[Document]:
    path = shard.root / part.name
    with open_plain(path) as file:
        offset = 0
        if part.start:
            # A line belongs to the part that has its first byte.
            file.seek(part.start - 1)
            skip_line(file)
            offset = file.tell()
        while offset < part.stop and (line := read_line(file)):
            begin, offset = offset, offset + len(line)
            if not begin and line.startswith(codecs.BOM_UTF8):
                line = line[len(codecs.BOM_UTF8) :]
            if line.isspace() or not line:
                continue
            with _named(path, begin):
                row, strings = _row_of_line(line, shard.format)
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}:{_line_number(path, begin)} is a JSON {_json_kind(row)}, not an "
                    f"object. Write each line as {_form(shard)}."
                )
            if shard.format != "text":
                text: str | Row | Iterator[str] = shard.pick(row, part.file, begin)
            else:
                text = _field_of_row(path, begin, row, shard.column)
                text = _pieces(path, begin, text, strings) if strings else text
            del line, row, strings  # they may be as long as the text
            yield Document(part.file, begin, text)


def _row_of_line(line: bytes | bytearray, kind: str) -> tuple[Any, dict[str, LongString]]:
    if isinstance(line, bytearray) and kind == "text":
        return parse_long_line(line)
    return parse_json(line.decode()), {}


def _pieces(
    path: Path, offset: int, text: str, strings: dict[str, LongString]
) -> str | Iterator[str]:
    """A field's text, in pieces if it is long; the row's other long strings are checked."""
    for name, string in strings.items():
        if name != text:
            with _named(path, offset):
                string.check()
    return _sound(path, offset, strings[text]) if text in strings else text


def _sound(path: Path, offset: int, string: LongString) -> Iterator[str]:
    with _named(path, offset):
        for piece in string.pieces():
            yield _with_whole_pairs(piece)


@contextmanager
def _named(path: Path, offset: int) -> Iterator[None]:
    """Turn what is wrong with a line into an error that says where it is."""
    try:
        yield
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


def _form(shard: Shard) -> str:
    """What a line of a shard looks like."""
    if shard.format == "prompt-completion":
        return '{"prompt": "...", "completion": "..."}'
    if shard.format == PARTS:
        return f'{{"{PARTS}": [...]}}'
    if shard.format == "messages":
        name = "messages" if shard.column == "text" else shard.column
        return f'{{"{name}": [...]}}'
    return f'{{"{shard.column}": "..."}}'


def _field_of_row(path: Path, offset: int, row: dict[str, Any], name: str) -> str:
    try:
        text = walk(row, name)
    except MissingFieldError as error:
        raise DataError(
            f"{path}:{_line_number(path, offset)} {error} Set data.field to the field that holds "
            "the text."
        ) from None
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(
            f'{path}:{_line_number(path, offset)} has a JSON {_json_kind(text)} in field "{name}", '
            "not text. Set data.field to the field that holds the text."
        )
    return _with_whole_pairs(text)


def _with_whole_pairs(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON may escape and UTF-8 cannot encode."""
    if _SURROGATE.search(text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


_SURROGATE = re.compile("[\ud800-\udfff]")


def _read_row_groups(shard: Shard, part: Part) -> Iterator[Document]:
    path = shard.root / part.name
    with open_parquet(path) as parquet:
        groups = parquet.metadata
        parts = [groups.row_group(index) for index in range(part.start, part.stop)]
        rows = rows_at_once(sum(each.num_rows for each in parts), part.size_bytes)
        steps: tuple[str, ...] = ()
        names = read_columns(shard.format, shard.column, parquet.schema_arrow.names)
        if shard.format == "text":
            steps = field_of(path, parquet.schema_arrow, shard.column)
            names = [".".join(steps)]
        batches = parquet.iter_batches(
            batch_size=rows, row_groups=list(range(part.start, part.stop)), columns=names
        )
        if steps:
            yield from _rows(part, (column_of(batch, steps) for batch in batches))
        else:
            yield from _talks(shard, part, batches)


def _read_batches(shard: Shard, part: Part) -> Iterator[Document]:
    path = shard.root / part.name
    with ArrowFile(path) as arrow:
        batches = arrow.batches(part.start, part.stop)
        if shard.format == "text":
            steps = field_of(path, arrow.schema, shard.column)
            yield from _rows(part, (column_of(batch, steps) for batch in batches))
        else:
            names = read_columns(shard.format, shard.column, arrow.schema.names)
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
        rows = rows_at_once(len(column), column.nbytes)
        for start in range(0, len(column), rows):
            for text in column.slice(start, rows).to_pylist():
                yield Document(part.file, row, text or "")
                row += 1


def _not_utf8(path: Path, error: UnicodeDecodeError, offset: int) -> DataError:
    return DataError(
        f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset "
        f"{offset + error.start:,}. Convert the file to UTF-8 or move it out of data.path."
    )


def _line_number(path: Path, offset: int) -> int:
    with open_plain(path) as file:
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
    "python-functions": _read_functions,
    "text": _read_text,
    "jsonl": _read_lines,
    "parquet": _read_row_groups,
    "datasets": _read_batches,
}
