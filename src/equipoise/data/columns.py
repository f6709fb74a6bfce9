"""Columns of Parquet and Arrow files, opened with pyarrow where it is installed.

Kept true (tests/unit/data/test_source.py)
    A missing column is reported with the nearest one that exists; a missing pyarrow, with the fix.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from equipoise.base.errors import DataError
from equipoise.base.nearest import nearest
from equipoise.base.shown import listed
from equipoise.data.compressed import compression_of, open_plain
from equipoise.data.fields import MissingFieldError, resolve


def _pyarrow(path: Path) -> Any:
    """Import pyarrow, which takes 0.3 s, only to read its files."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"Reading {path} needs pyarrow, which is not installed. Run: "
            "pip install 'equipoise[parquet]'"
        ) from None
    return pyarrow


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Open a Parquet file with pyarrow; a compressed one is decompressed to a temporary file.

    Raises:
        DataError: it is not a Parquet file, or pyarrow is not installed.
    """
    pyarrow = _pyarrow(path)
    with ExitStack() as stack:
        file: Any = path
        if compression_of(path):
            file = stack.enter_context(TemporaryFile())
            shutil.copyfileobj(stack.enter_context(open_plain(path)), file)
        try:
            parquet = stack.enter_context(pyarrow.parquet.ParquetFile(file))
        except pyarrow.ArrowInvalid as error:
            raise DataError(
                f"{path} is not a parquet file: {str(error).rstrip('.')}. Write the file again or "
                "move it out of data.path."
            ) from None
        try:
            yield parquet
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error) from None
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{path} is a damaged parquet file: {' '.join(str(error).split()).rstrip('. ')}. "
                "Write the file again or move it out of data.path."
            ) from None


def _not_utf8(path: Path, error: UnicodeDecodeError) -> DataError:
    """Arrow's own writers let bytes of any kind pass for text."""
    return DataError(
        f"{path} has text that is not UTF-8: byte 0x{error.object[error.start]:02x}. Write the "
        "file again or move it out of data.path."
    )


def field_of(path: Path, schema: Any, name: str) -> tuple[str, ...]:
    """The column, and fields of nested structs in it, that a dotted name means.

    Raises:
        DataError: there is none, or it holds no text.
    """
    columns = list(schema.names)
    try:
        steps = resolve(schema, name, _names, _enter)
    except MissingFieldError:
        nested = [each for each in _dotted(schema) if each not in columns]
        also = f", and in structs {', '.join(nested)}" if nested else ""
        raise DataError(
            f'{path} has no column "{name}" among its {len(columns)} ({listed(columns)}{also}). '
            f'Nearest: "{nearest(name, [*columns, *nested])}". Set data.field to the column that '
            "holds the text."
        ) from None
    node = schema
    for step in steps:
        node = _enter(node, step)
    kind = str(node)
    if kind not in ("string", "large_string", "string_view"):
        raise DataError(
            f'{path} has {kind} in column "{name}", not text. Set data.field to the column that '
            f"holds the text; the columns are {', '.join(columns)}."
        )
    return steps


def column_of(batch: Any, steps: tuple[str, ...]) -> Any:
    """The array at a field of a record batch; null where a struct around it is null."""
    from pyarrow import compute

    column = batch.column(batch.schema.get_field_index(steps[0]))
    return compute.struct_field(column, list(steps[1:])) if len(steps) > 1 else column


def rows_at_once(rows: int, size_bytes: int) -> int:
    """Rows that are in memory at the same time: 16 MiB of them, at least one, at most 1,024."""
    return max(1, min(1024, rows * _ROWS_BYTES // max(1, size_bytes)))


def _names(node: Any) -> list[str] | None:
    """The fields of a schema or of a struct type; None of any other type."""
    if hasattr(node, "names"):
        return list(node.names)
    return (
        [node.field(place).name for place in range(node.num_fields)] if _is_struct(node) else None
    )


def _enter(node: Any, step: str) -> Any:
    return node.field(step).type


def _is_struct(node: Any) -> bool:
    return str(node).startswith("struct<")


def _dotted(node: Any) -> Iterator[str]:
    """Every field below a schema or a struct type, by its dotted name."""
    for name in _names(node) or ():
        below = _enter(node, name)
        yield name
        for each in _dotted(below):
            yield f"{name}.{each}"


_ROWS_BYTES = 16 << 20


def check_rows(path: Path, schema: Any, wanted: Sequence[str], is_whole: bool) -> None:
    """Refuse a file of rows that lacks the columns of its format.

    Args:
        path: The file.
        schema: Its columns.
        wanted: Columns that a row has.
        is_whole: Whether it has all of them, rather than any.

    Raises:
        DataError: as above.
    """
    names = list(schema.names)
    outer = [each if each in names else each.partition(".")[0] for each in wanted]
    missing = [each for each, first in zip(wanted, outer, strict=True) if first not in names]
    if missing and (is_whole or len(missing) == len(wanted)):
        raise DataError(
            f'{path} has no column "{missing[0]}" among its {len(names)} ({listed(names)}). '
            f'Nearest: "{nearest(missing[0], names)}". Rename the column, or set data.format to '
            "what a row is."
        )


class ArrowFile:
    """An arrow IPC file in either format: datasets writes streams, others write files."""

    def __init__(self, path: Path) -> None:
        pyarrow = _pyarrow(path)
        self._path, self._faults = path, (pyarrow.ArrowException, OSError)
        with ExitStack() as stack:
            try:
                self._map = stack.enter_context(pyarrow.memory_map(str(path)))
                if self._map.read(6) == b"ARROW1":
                    self._file = pyarrow.ipc.open_file(self._map)
                    self._stream = None
                    self.schema = self._file.schema
                else:
                    self._map.seek(0)
                    self._stream = pyarrow.ipc.open_stream(self._map)
                    self.schema = self._stream.schema
            except self._faults as error:
                raise DataError(
                    f"{path} is not an arrow IPC stream or file: {error}. Save the dataset again "
                    "with save_to_disk."
                ) from None
            stack.pop_all()

    def __enter__(self) -> "ArrowFile":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._map.close()
        if isinstance(error, UnicodeDecodeError):
            raise _not_utf8(self._path, error) from None
        if isinstance(error, self._faults):
            raise DataError(
                f"{self._path} is a damaged arrow file: "
                f"{' '.join(str(error).split()).rstrip('. ')}. Save the dataset again with "
                "save_to_disk."
            ) from None

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """Record batches [start, stop), memory-mapped, so that skipping one is free."""
        if self._stream is None:
            for index in range(start, self._file.num_record_batches if stop is None else stop):
                yield self._file.get_batch(index)
            return
        for index, batch in enumerate(self._stream):
            if index == stop:
                return
            if index >= start:
                yield batch
