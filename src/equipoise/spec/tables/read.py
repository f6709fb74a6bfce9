"""Embedding tables by name, from a CSV file, or drawn: what ``equipoise explain tables`` plans.

What it decides
    Named tables are published ones; each file's first line says where its numbers come from.
    ``synthetic:N`` draws N tables whose rows and traffic differ by factors of thousands, as those
    of production models do, from a counter, so that every machine draws the same.

Kept true (tests/unit/spec/test_tables.py)
    Missing columns, unreadable numbers and doubled names are refused with their line.

Sources
    Spread of rows and pooling: table 2 and figure 9 of arXiv:2104.05158 describe the shape;
    the parameters here are ours, and what they draw is labelled synthetic.
"""

import csv
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from equipoise.base.errors import DataError, SpecError
from equipoise.base.nearest import nearest
from equipoise.base.read import read_bytes
from equipoise.base.shown import listed, shorten, shown
from equipoise.base.whole import whole_number
from equipoise.spec.tables.table import TableSpec

_FOLDER = resources.files("equipoise.spec") / "tables"
_NEEDED = ("name", "rows", "width", "ids_per_sample")
_MOST_DRAWN = 100_000


def table_set_names() -> list[str]:
    """Names of the shipped sets of tables.

    >>> table_set_names()
    ['criteo-kaggle', 'mlperf-dcnv2']
    """
    names = (entry.name for entry in _FOLDER.iterdir())
    return sorted(name.removesuffix(".csv") for name in names if name.endswith(".csv"))


def read_tables(what: str) -> tuple[tuple[TableSpec, ...], str]:
    """The tables that a flag means, and where they come from.

    Args:
        what: A name, ``synthetic:N``, or a CSV file with columns name, rows, width and
            ids_per_sample.

    Raises:
        SpecError: nothing has that name.
        DataError: the file is wrong; names the line.
    """
    kind, _, count = what.partition(":")
    if kind == "synthetic" and count:
        drawn = whole_number(count) or 0
        if not 1 <= drawn <= _MOST_DRAWN:
            raise SpecError(
                f'"{what}": synthetic needs a count from 1 to {_MOST_DRAWN:,}, as in '
                "synthetic:1000."
            )
        return draw_tables(drawn), f"{drawn:,} synthetic tables"
    if what in table_set_names():
        text = (_FOLDER / f"{what}.csv").read_text(encoding="utf-8")
        return parse_tables(text, f"{what}.csv"), what
    path = Path(what)
    if path.suffix == ".toml":
        raise SpecError(
            f"{what} is not a CSV file of tables. Where a run's tables lie: equipoise plan {what}"
        )
    if not path.is_file():
        names = [*table_set_names(), "synthetic:N"]
        raise SpecError(
            f'"{what}" is neither a file nor one of {", ".join(names)}. Nearest: '
            f'"{nearest(what, names)}".'
        )
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{what} is not UTF-8 text. Save it as UTF-8.") from None
    return parse_tables(text, path.name), path.name


def parse_tables(text: str, label: str) -> tuple[TableSpec, ...]:
    """Tables of a CSV text; lines that begin with # are comments.

    Raises:
        DataError: a column is missing, or a line is wrong.
    """
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.startswith("#")
    ]
    rows = [_cells(f"{label}:{number}", line) for number, line in lines]
    head: Sequence[str] = [each.strip() for each in rows[0]] if rows else []
    if missing := [name for name in _NEEDED if name not in head]:
        raise DataError(
            f"{label} lacks the columns {', '.join(missing)}; it has {listed(head) or 'none'}. "
            f"Write name,rows,width,ids_per_sample in its first line."
        )
    if doubled := [name for name in head if head.count(name) > 1]:
        raise DataError(f"{label} has two columns {shown(doubled[0])}. Rename one.")
    tables: list[TableSpec] = []
    names: set[str] = set()
    for (number, _), row in zip(lines[1:], rows[1:], strict=True):
        if len(row) > len(head):
            raise DataError(
                f"{label}:{number}  {len(row)} values under {len(head)} columns. Write one for "
                "each, numbers without commas."
            )
        values = dict(zip(head, row, strict=False))
        try:
            table = TableSpec(
                values["name"].strip(),
                int(values["rows"]),
                int(values["width"]),
                float(values["ids_per_sample"]),
            )
        except (KeyError, ValueError):
            raise DataError(
                f"{label}:{number}  needs a name, two whole numbers and a number, got "
                f"{shown(','.join(row))}."
            ) from None
        except SpecError as error:
            raise DataError(f"{label}:{number}  {error}") from None
        if table.name in names:
            raise DataError(f"{label}:{number}  a second table {shorten(table.name)}. Rename one.")
        names.add(table.name)
        tables.append(table)
    if not tables:
        raise DataError(f"{label} lists no table. Give it a line for each.")
    return tuple(tables)


def _cells(where: str, line: str) -> list[str]:
    """The cells of a line; each is read by itself, so an open quote does not swallow the next."""
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise DataError(f"{where}  is not CSV: {error}. Correct the line.") from None


def draw_tables(count: int, seed: int = 0) -> tuple[TableSpec, ...]:
    """Skewed synthetic tables: rows and ids per sample are log-normal, widths 32 to 256.

    >>> draw_tables(2)[0].name, draw_tables(3)[:2] == draw_tables(2)
    ('t0', True)
    """
    source = np.random.Generator(np.random.Philox(key=seed))
    normal = source.standard_normal((count, 3))
    rows = np.clip(np.exp(11.5 + 2.2 * normal[:, 0]), 4, 2e8).astype(np.int64)
    ids = np.clip(np.exp(0.7 + 1.3 * normal[:, 1]), 0.05, 400.0)
    widths = 32 << np.clip(np.rint(1 + 0.7 * normal[:, 2]), 0, 3).astype(np.int64)
    return tuple(
        TableSpec(f"t{index}", int(rows[index]), int(widths[index]), round(float(ids[index]), 3))
        for index in range(count)
    )
