"""Columns of Parquet and Arrow files, opened with pyarrow where it is installed.

Kept true (tests/unit/data/test_source.py)
    A missing column is reported with the nearest one that exists; a missing pyarrow, with the fix.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from equipoise.base.errors import DataError
from equipoise.base.nearest import nearest


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


def open_parquet(path: Path) -> Any:
    """Open a Parquet file with pyarrow.

    Raises:
        DataError: it is not a Parquet file, or pyarrow is not installed.
    """
    pyarrow = _pyarrow(path)
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(
            f"{path} is not a parquet file: {error} Write the file again or move it out of "
            "data.path."
        ) from None


def check_column(path: Path, schema: Any, name: str) -> None:
    """Refuse a file whose column ``name`` is missing or holds no text.

    Raises:
        DataError: as above.
    """
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
    missing = [name for name in wanted if name not in names]
    if missing and (is_whole or len(missing) == len(wanted)):
        raise DataError(
            f'{path} has no column "{missing[0]}" among its {len(names)} ({", ".join(names)}). '
            f'Nearest: "{nearest(missing[0], names)}". Rename the column, or set data.format to '
            "what a row is."
        )


class ArrowFile:
    """An arrow IPC file in either format: datasets writes streams, others write files."""

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

    def __enter__(self) -> "ArrowFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()

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
