"""Columns of files: Parquet, CSV and TSV, and ML-100K as the recbole wheel holds it.

What it decides
    Numbers of Parquet stay what they are, all else is the text that a request would have. What two
    readers would understand differently is refused: two columns of one name, lists where a sample
    has one value, NUL characters, which NumPy drops at a text's end.

Kept true (tests/unit/recsys/test_columns.py)
    Files of either kind are read alike, ids are kept digit for digit, and times are sorted exactly.
"""

import csv
import importlib.util
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import DataError
from equipoise.base.read import read_text, reason
from equipoise.base.shown import counted, shown
from equipoise.data.columns import open_parquet
from equipoise.recsys.rank.coding import ListText

ML_100K = "ml-100k"
_ATOMIC_TYPES = ("token", "token_seq", "float", "float_seq")
"""Types of columns in the atomic files of RecBole 1.2, written ``name:type``."""
Columns = dict[str, np.ndarray]


def read_columns(path: Path, key: str = "data.path") -> Columns:
    """Every column of a Parquet, CSV or TSV file.

    Args:
        path: The file.
        key: The key or flag that named it, for messages.

    Raises:
        DataError: no such file, not of this kind, or a line has another number of values.
    """
    if not path.is_file():
        raise DataError(f"No such file: {path}. Set {key} to a Parquet, CSV or TSV file.")
    if path.suffix.lower() == ".parquet":
        with open_parquet(path) as parquet:
            table = parquet.read()
            _require_distinct(path, table.column_names)
            return {name: _column(path, name, table.column(name)) for name in table.column_names}
    delimiter = "," if path.suffix.lower() == ".csv" else "\t"
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {reason(error)}. Set {key} to a Parquet, CSV or TSV file."
        ) from None
    if (nul := text.find("\0")) >= 0:  # NumPy drops it at a text's end: two ids would be one
        raise DataError(
            f"{path.name}:{text.count(chr(10), 0, nul) + 1}  has a NUL character. Take it out."
        )
    # Strict: a quote that nobody closes would take all lines after it into one value.
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    body: list[list[str]] = []
    line = 1
    try:
        head = [_name_of(title) for title in next(rows, [])]
        _require_distinct(path, head)
        line = rows.line_num + 1
        for row in rows:
            if len(row) != len(head):
                raise DataError(
                    f"{path.name}:{line}  {counted(len(row), 'value')} under "
                    f"{counted(len(head), 'column')}. Write one for each."
                )
            body.append(row)
            line = rows.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path.name}:{line}  is not CSV: {_why(error)}. Correct the line."
        ) from None
    if not body:
        raise DataError(f"{path} holds no rows below its line of column names. Give it some.")
    return {name: np.array([row[at] for row in body]) for at, name in enumerate(head)}


def _why(error: csv.Error) -> str:
    """What Python says of a line, whose words for quotes are those of its parser."""
    said = str(error)
    if said == "unexpected end of data":
        return "a quote is not closed"
    return "a value goes on behind its closing quote" if "expected after" in said else said


def _name_of(title: str) -> str:
    """The name of a column, without the type that recbole's files write behind it.

    >>> _name_of("user_id:token"), _name_of("price:usd"), _name_of(" t ")
    ('user_id', 'price:usd', 't')
    """
    name, _, kind = title.strip().rpartition(":")
    return name.strip() if name and kind.strip() in _ATOMIC_TYPES else title.strip()


def _require_distinct(path: Path, names: Sequence[str]) -> None:
    """Refuse a name of two columns: nothing says which of them a key means."""
    doubled = [name for name in names if names.count(name) > 1]
    if doubled:
        raise DataError(f"{path.name} has two columns {shown(doubled[0])}. Rename one.")


def _column(path: Path, name: str, column: Any) -> np.ndarray:
    """A column of Parquet: numbers as they are, all else as the texts that requests have.

    NumPy has no integer that is missing: one null would make all ids of a column floats, in which
    neighbours above 2^53 are one. So would integers below and from 2^63 on in one column.
    """
    where = f"{path.name}, column {shown(name)}"
    try:
        values = column.to_pylist()
    except (ValueError, OverflowError):
        raise DataError(
            f"{where}: Python has no such {column.type}. Write numbers or texts, or leave the "
            "column out."
        ) from None
    if all(isinstance(value, int) for value in values):
        is_beyond = max(values, default=0) > np.iinfo(np.int64).max
        return np.array(values, dtype=np.uint64 if is_beyond else None)
    if all(value is None or isinstance(value, float) for value in values):
        return np.array([np.nan if value is None else value for value in values])
    cells = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        try:
            cells[row] = _cell(value)
        except UnicodeDecodeError:
            raise DataError(
                f"{where}, row {row + 1:,}: the bytes are not UTF-8 text. Write them as "
                "hexadecimal digits, or leave the column out."
            ) from None
        if isinstance(cells[row], str) and "\0" in cells[row]:
            raise DataError(
                f"{where}, row {row + 1:,}: the text has a NUL character. Take it out, or leave "
                "the column out."
            )
    is_plain = not any(value is None or isinstance(value, list | dict) for value in values)
    return np.array(cells.tolist()) if is_plain else cells


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        is_nested = any(isinstance(each, list | dict | tuple) for each in value)
        return value if is_nested else ListText.of([*map(_cell, value)])
    return np.nan if value is None else value.decode() if isinstance(value, bytes) else value


def read_ml_100k() -> Columns:
    """MovieLens 100K as the recbole wheel holds it, users and items joined to ratings.

    Raises:
        DataError: recbole is not installed.
    """
    spec = importlib.util.find_spec("recbole")
    places: Sequence[str] = [] if spec is None else list(spec.submodule_search_locations or ())
    folder = Path(places[0]) / "dataset_example" / ML_100K if places else Path()
    if not places or not folder.is_dir():
        raise DataError(
            "ML-100K is read from the package recbole, which is not installed. Run: pip install "
            "--no-deps recbole==1.2.1"
        )
    ratings = _atomic(folder / "ml-100k.inter")
    columns = dict(ratings)
    for file, key in (("ml-100k.user", "user_id"), ("ml-100k.item", "item_id")):
        other = _atomic(folder / file)
        place = {value: row for row, value in enumerate(other[key].tolist())}
        index = np.array([place[value] for value in ratings[key].tolist()])
        columns |= {name: values[index] for name, values in other.items() if name != key}
    stamps = columns["timestamp"].astype(np.float64)
    years = columns["release_year"]
    known = np.char.isdigit(years)
    columns["year"] = np.where(known, years, "1995").astype(np.float64)
    columns["hour"] = (stamps // 3600 % 24).astype(np.int64)
    columns["zip3"] = np.array([code[:3] for code in columns["zip_code"].tolist()])
    columns["age5"] = columns["age"].astype(np.int64) // 5
    columns["genres"] = columns.pop("class")
    return columns


def _atomic(path: Path) -> Columns:
    """A file of recbole: tab-separated, typed column names, no quotes."""
    lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    head = [_name_of(title) for title in lines[0].split("\t")]
    body = [line.split("\t") for line in lines[1:]]
    return {name: np.array([row[at] for row in body]) for at, name in enumerate(head)}


def column_numbers(
    columns: Mapping[str, np.ndarray],
    name: str,
    label: str,
    fix: str = "Fix it, or list the column under data.ids",
) -> Floats:
    """A column as finite numbers; ``fix`` ends the message of a value that is not a number.

    Raises:
        DataError: names the first row that is not one.
    """
    values = columns[name]
    require_values(values, name, label, is_bag=False)
    try:
        numbers = values.astype(np.float64)
    except (TypeError, ValueError):
        at = next(row for row, value in enumerate(values.tolist()) if not _is_number(value))
        raise DataError(
            f"{label}, column {name}, row {at + 1:,}: {shown(str(values[at]))} is not a number. "
            f"{fix}."
        ) from None
    bad = np.flatnonzero(~(np.abs(numbers) <= np.finfo(np.float32).max))
    if len(bad):
        raise DataError(
            f"{label}, column {name}: {len(bad):,} of {len(numbers):,} rows are NaN or beyond "
            f"float32, the first is row {int(bad[0]) + 1:,}. Fill them or leave these rows out."
        )
    return numbers


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def time_order(columns: Mapping[str, np.ndarray], name: str, label: str) -> tuple[Ints, Floats]:
    """Rows by time, equal times as they stand in the file, int64 [rows], and the times.

    Whole numbers are compared exactly: as floats, nanoseconds since 1970 are 256 apart. Dates and
    timestamps are seconds since 1970.

    Raises:
        DataError: names the first row that is not a time.
    """
    cells = columns[name].tolist() if columns[name].dtype == object else []
    are_dates = [isinstance(cell, date) for cell in cells]
    if any(are_dates) and not all(are_dates):
        raise DataError(
            f"{label}, column {name}, row {are_dates.index(False) + 1:,}: there is no time. Fill "
            "it, or leave the row out."
        )
    if any(are_dates):
        since = np.array([_nanoseconds(cell) for cell in cells], dtype=np.int64)
        return np.argsort(since, kind="stable"), since / 1e9
    fix = "Write times as numbers, such as seconds since 1970"
    stamps, column = column_numbers(columns, name, label, fix), columns[name]
    exact: np.ndarray = column if column.dtype.kind in "iu" else stamps
    if column.dtype.kind == "U":
        with suppress(ValueError, OverflowError):
            exact = column.astype(np.int64)
    return np.argsort(exact, kind="stable"), stamps


def _nanoseconds(time: date) -> int:
    """Since 1970, by the time's own zone or, without one, in UTC.

    >>> _nanoseconds(date(1970, 1, 2)), _nanoseconds(datetime(1970, 1, 1, microsecond=7))
    (86400000000000, 7000)
    """
    whole = time if isinstance(time, datetime) else datetime(time.year, time.month, time.day)
    begin = datetime(1970, 1, 1, tzinfo=None if whole.tzinfo is None else UTC)
    # Timestamps of pandas, which pyarrow gives for nanoseconds, are datetimes with a further part.
    return 1000 * ((whole - begin) // timedelta(microseconds=1)) + getattr(time, "nanosecond", 0)


def require_values(column: np.ndarray, name: str, label: str, *, is_bag: bool) -> None:
    """Refuse lists and objects where a sample has one value, and lists in lists, as requests do.

    Raises:
        DataError: names the first row that is wrong.
    """
    for row, value in enumerate(column.tolist() if column.dtype == object else (), start=1):
        if isinstance(value, dict):
            what, fix = "an object", "Write its fields as columns"
        elif isinstance(value, list):
            what, fix = "a list of lists or objects", "Write a list of texts or numbers"
        elif isinstance(value, ListText) and not is_bag:
            what, fix = "a list", "List it in data.bags"
        else:
            continue
        raise DataError(
            f"{label}, column {shown(name)}, row {row:,}: {what}, where a sample has "
            f"{'texts or numbers' if is_bag else 'one value'}. {fix}."
        )
