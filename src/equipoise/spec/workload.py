"""Document lengths: from a named distribution or a file, as arrays of tokens.

Why
    A corpus's lengths are in whatever file the last tool wrote. An invalid length that is read
    as one changes every number that follows, so each is refused with its line.

What it decides
    Which column of a file holds the lengths, and what counts as a length: a whole number of
    tokens from 1 to 2,147,483,647, written ``512`` or ``512.0``.

Kept true (tests/unit/spec/test_workload.py, by Hypothesis)
    CSV, JSON lines, Parquet and text read back what was written, by the fast and the slow path
    alike; a row with more or fewer cells than columns, or a quote that stays open, is refused;
    drawn lengths have the moments of the named distribution.

Sources
    The first line of each file of ``spec/lengths`` names the source of its quantiles.
"""

import csv
import io
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from equipoise.base.errors import DataError, SpecError
from equipoise.base.nearest import nearest
from equipoise.base.read import parse_json, reason, require_file
from equipoise.base.shown import counted

Lengths = npt.NDArray[np.int64]

_FOLDER = resources.files("equipoise.spec") / "lengths"

_COLUMNS = ("tokens", "length")  # the first that is there holds the lengths

_MOST_TOKENS = 2**31 - 1
"""Longest document; its pairs still fit int64, and attention kernels count in int32."""

_NUMBER = re.compile(r'\s*"?\s*([-+.\d]|nan\b|inf\b|null\b)', re.IGNORECASE)
"""How a line of numbers begins, also a wrong one; any other first line is a header."""

_DIGITS = 10
"""Most digits that the fast path reads: it must not wrap around int64."""

_NAMED = 12  # most columns that a message names


def distribution_names() -> list[str]:
    """Names of the embedded length distributions.

    >>> distribution_names()
    ['pretrain-128k', 'prolong', 'python-stdlib', 'wikipedia']
    """
    return sorted(entry.name.removesuffix(".csv") for entry in _FOLDER.iterdir())


def draw_lengths(name: str, documents: int, *, seed: int = 0) -> Lengths:
    """Draw document lengths [tokens] from an embedded distribution.

    Args:
        name: One of ``distribution_names()``.
        documents: How many to draw.
        seed: The same seed draws the same lengths.

    Raises:
        DataError: no such distribution; names the nearest.
    """
    if name not in distribution_names():
        raise DataError(
            f'No length distribution is called "{name}". Nearest: '
            f"{nearest(name, distribution_names())}. All: {', '.join(distribution_names())}."
        )
    lines = (_FOLDER / f"{name}.csv").read_text().splitlines()
    rows = [line.split(",") for line in lines if line and line[0].isdigit()]
    quantiles = np.array([float(row[0]) for row in rows])
    tokens = np.array([max(1.0, float(row[1])) for row in rows])
    # Not Philox, whose stream for this seed orders documents: lengths would come out sorted.
    drawn = np.random.Generator(np.random.PCG64(seed)).random(documents)
    lengths: Lengths = np.rint(np.exp(np.interp(drawn, quantiles, np.log(tokens)))).astype(np.int64)
    return lengths


def listed_lengths(text: str, *, least: int = 1) -> tuple[int, ...] | None:
    """Lengths in a list, as in 3000,40,900; None if the text names something instead.

    Args:
        text: What ``--lengths`` gives.
        least: The shortest length [tokens].

    Raises:
        SpecError: a word of the list is not a length.
    """
    if "," not in text and not text.isdigit():
        return None
    words = [word.strip() for word in text.rstrip(",").split(",")]
    wrong = [word for word in words if not re.fullmatch(r"\d+(_\d+)*", word)]
    wrong = wrong or [
        word for word in words if len(word) > 20 or not least <= int(word) <= _MOST_TOKENS
    ]
    if not wrong:
        return tuple(int(word) for word in words)
    if Path(text).is_file():
        return None
    raise SpecError(
        f'--lengths {text}: "{wrong[0]}" is not a length. Give whole numbers of tokens, as in '
        f"3000,40,900."
    )


def read_lengths(file: Path) -> Lengths:
    """Document lengths [tokens] of a CSV, JSON-lines, Parquet or plain text file, in its order.

    Text has one length per line. CSV and Parquet are read from the column ``tokens``, JSON
    objects from that key, or else from ``length``. Blank lines of text and lines that begin with
    ``#`` are skipped.

    Args:
        file: Parquet is recognised by its first bytes, JSON lines by ``.jsonl``; anything else is
            CSV or text.

    Returns:
        int64[documents], each >= 1.

    Raises:
        DataError: no such file or column, an invalid length, or none at all; names the row and
            the fix.
        ModuleNotFoundError: the file is Parquet and pyarrow is not installed.

    Cost: O(rows); 10 million take about a second as text or Parquet, several as CSV of many
    columns, and half a minute as JSON objects.
    """
    try:
        require_file(file)
        with file.open("rb") as opened:
            data = opened.read(4)
            data += b"" if data == b"PAR1" else opened.read()
        lengths = _read_parquet(file) if data == b"PAR1" else _read_text(file, data)
    except FileNotFoundError:
        raise DataError(
            f"No lengths file or distribution is called {file}. Distributions: "
            f"{', '.join(distribution_names())}."
        ) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{file} cannot be read as text ({reason(error)}). Give CSV, JSON lines, Parquet, or "
            f"one whole number per line."
        ) from None
    if not len(lengths):
        raise DataError(f"{file} holds no document lengths. Give one whole number per line.")
    return lengths


def _read_text(file: Path, data: bytes) -> Lengths:
    lengths = _read_digits(data)
    if lengths is not None:
        return lengths
    text = data.decode("utf-8-sig")
    return (
        _collect(file, _json_values(file, text))
        if file.suffix == ".jsonl"
        else _read_table(file, text)
    )


def _read_digits(data: bytes) -> Lengths | None:
    """Read lines of digits all at once; None if there is anything else."""
    codes = np.frombuffer(data, dtype=np.uint8)
    is_break = (codes == ord("\n")) | (codes == ord("\r"))
    if not (is_break | (codes - np.uint8(ord("0")) < 10)).all():
        return None
    breaks = np.concatenate(([-1], np.flatnonzero(is_break), [len(codes)]))
    if np.diff(breaks).max() > _DIGITS + 1:
        return None
    return _in_range(np.fromstring(data, dtype=np.int64, sep="\n"))


def _in_range(lengths: Lengths) -> Lengths | None:
    """The lengths, if all are valid; None if the slow path must find the invalid one."""
    return lengths if ((lengths >= 1) & (lengths <= _MOST_TOKENS)).all() else None


def _read_table(file: Path, text: str) -> Lengths:
    """Read CSV with a header, or one value per line."""
    first = re.search(r"^(?!#).*\S.*$", text, re.MULTILINE)
    if first is None:
        return np.zeros(0, dtype=np.int64)
    number = text.count("\n", 0, first.start()) + 1
    delimiter = "\t" if "\t" in first[0] else ","
    try:
        cells = [name.strip() for name in next(csv.reader([first[0]], delimiter=delimiter))]
        next(csv.reader([first[0].rstrip("\r")], delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise _not_csv(file, number, error) from None
    if _NUMBER.match(first[0]):
        if len(cells) > 1:
            raise DataError(
                f"{file}:{number}  {len(cells)} columns, and no header says which holds the "
                f"lengths. Put a first line there that calls it tokens."
            )
        column, body = 0, text[first.start() :]
    else:
        column, body = cells.index(_column(file, number, cells)), text[first.end() :]
    if len(cells) == 1:
        lengths = _read_digits(body.encode())
    elif '"' in body or re.search(r"^#", body, re.MULTILINE):  # NumPy swallows an open quote
        lengths = None
    else:
        lengths = _read_column(body, delimiter, column, len(cells))
    if lengths is not None:
        return lengths
    before = text.count("\n", 0, len(text) - len(body))
    return _collect(file, _csv_values(file, body, before, delimiter, column, len(cells)))


def _read_column(body: str, delimiter: str, column: int, columns: int) -> Lengths | None:
    """Read one column of whole numbers by NumPy's parser; None if it fails.

    Args:
        body: Lines without quotes and comments.
        delimiter: What stands between cells.
        column: The one to read.
        columns: Cells of each line.
    """
    codes = np.frombuffer(body.encode(), dtype=np.uint8)
    breaks = np.concatenate(([-1], np.flatnonzero(codes == ord("\n")), [len(codes)]))
    delimiters = np.diff(np.searchsorted(np.flatnonzero(codes == ord(delimiter)), breaks))
    is_blank = (delimiters == 0) & (np.diff(breaks) <= 2)  # a line end and a carriage return
    if not (is_blank | (delimiters == columns - 1)).all():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it reads 1.5 as 1, and nothing at all, with a warning
            lengths = np.loadtxt(
                io.StringIO(body),
                dtype=np.int64,
                comments=None,
                delimiter=delimiter,
                usecols=column,
                ndmin=1,
            )
    except (ValueError, Warning):
        return None
    return _in_range(lengths)


def _csv_values(
    file: Path, body: str, before: int, delimiter: str, column: int, columns: int
) -> Iterator[tuple[int, str]]:
    """Line number and text of each length; ``before`` lines precede ``body``."""
    # Strict: a quote that nobody closes would take all lines after it into one cell.
    reader = csv.reader(io.StringIO(body, newline=""), delimiter=delimiter, strict=True)
    line = before + 1
    try:
        for row in reader:
            if any(cell.strip() for cell in row) and not row[0].startswith("#"):
                if column < len(row) != columns:
                    raise DataError(
                        f"{file}:{line}  {counted(len(row), 'cell')} under "
                        f"{counted(columns, 'column')}. Write one for each, and numbers without "
                        f"commas."
                    )
                text = row[column].strip() if column < len(row) else ""
                yield before + reader.line_num, text
            line = before + reader.line_num + 1
    except csv.Error as error:
        raise _not_csv(file, line, error) from None


def _not_csv(file: Path, line: int, error: csv.Error) -> Exception:
    """The error for a row whose quotes are wrong; any other as it is."""
    said = str(error)
    if said == "unexpected end of data":
        said = "a quote is not closed"
    elif "expected after" in said:
        said = "a cell goes on behind its closing quote"
    else:
        return error
    return DataError(f"{file}:{line}  is not CSV: {said}. Correct the line.")


def _json_values(file: Path, text: str) -> Iterator[tuple[int, str | int]]:
    """Line number and value of each length."""
    for number, line in enumerate(text.split("\n"), 1):  # strings may hold other line ends
        if not line.strip() or line.startswith("#"):
            continue
        try:
            value = parse_json(line)
        except ValueError:
            yield number, line.strip()
            continue
        if isinstance(value, dict):
            name = "tokens" if "tokens" in value else _column(file, number, list(value), "key")
            value = value[name]
        yield number, value if isinstance(value, (int, str)) else json.dumps(value)


def _read_parquet(file: Path) -> Lengths:
    import pyarrow
    import pyarrow.parquet

    try:
        opened = pyarrow.parquet.ParquetFile(file)
        name = _column(file, None, opened.schema_arrow.names)
        column = opened.read(columns=[name]).column(0)
    except (OSError, pyarrow.ArrowException) as error:
        said = str(error).rstrip(".")
        raise DataError(f"{file} is not a whole Parquet file ({said}). Write it again.") from None
    if not (pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type)):
        raise DataError(f"{file}  column {name} is of type {column.type}. Cast it to int64.")
    values = column.to_numpy()
    bad = np.flatnonzero(~((values >= 1) & (values <= _MOST_TOKENS) & (values == np.floor(values))))
    if len(bad):
        value = column[int(bad[0])].as_py()
        text = "" if value is None else str(value)
        raise _no_length(f"{file} row {int(bad[0]) + 1:,}", text, len(bad) - 1)
    lengths: Lengths = values.astype(np.int64)
    return lengths


def _column(file: Path, line: int | None, names: Sequence[str], kind: str = "column") -> str:
    """The name of the column or key that holds the lengths."""
    where = f"{file}" if line is None else f"{file}:{line}"
    for name in _COLUMNS:
        if names.count(name) > 1:
            raise DataError(f"{where}  has two columns called {name}. Rename one.")
        if name in names:
            return name
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    have = ", ".join(names[:_NAMED]) + more
    listed = f" Nearest: {nearest(_COLUMNS[0], names)}. All: {have}." if names else ""
    raise DataError(
        f"{where}  no {kind} is called tokens or length.{listed} Call the one with the lengths "
        f"tokens."
    )


def _collect(file: Path, values: Iterable[tuple[int, str | int]]) -> Lengths:
    """Lengths from line numbers and values."""
    lengths: list[int] = []
    bad: list[tuple[int, str]] = []
    for number, value in values:
        tokens = _whole(value)
        if tokens:
            lengths.append(tokens)
        else:
            bad.append((number, str(value)))
    if bad:
        number, text = bad[0]
        raise _no_length(f"{file}:{number}", text, len(bad) - 1)
    return np.array(lengths, dtype=np.int64)


def _whole(value: str | int) -> int:
    """The length; 0 if invalid."""
    if isinstance(value, bool):
        return 0
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return 0
    return int(number) if 1 <= number <= _MOST_TOKENS and number.is_integer() else 0


def _no_length(where: str, text: str, others: int) -> DataError:
    shown = repr(text[:40]) if text else "an empty cell"
    if text.startswith("["):  # the tokens themselves, of whatever vocabulary
        shown = "a list"
    more = f", and neither are {others:,} after it" if others else ""
    return DataError(
        f"{where}  {shown} is not a document length{more}. Give each document one whole number "
        f"of tokens, 1 to {_MOST_TOKENS:,}, and leave empty documents out."
    )
