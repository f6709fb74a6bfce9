"""Tables on a console of any width: columns leave, then rows stack, and no cell is cut short.

Why
    A table that is wider than the console loses the ends of its cells to "…", and the cell that
    says how much was won is as likely to go as any. So each table says which columns are its keys.

What it decides
    Which columns there is room for. Those with a turn to go leave, first turn first, until the
    rest fits. If the keys alone do not fit, a row becomes a block, a line for each of its cells.

Kept true (tests/unit/cli/test_table.py)
    At any width, each key's cell of each row is printed, and none ends in an ellipsis.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

if TYPE_CHECKING:
    from rich.console import Console

_ENDLESS = 100_000
"""Wider than any table."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading, its side, and what becomes of it where there is little room."""

    name: str
    is_left: bool = False
    """Words stand left, numbers right."""
    goes: int = 0
    """Its turn to leave, from 1 on; 0 for a key, which stays."""
    wraps: int = 0
    """The fewest characters that its words wrap to; 0 if they do not wrap."""


Rows = Sequence[Sequence[str]]


def print_columns(
    console: "Console",
    columns: Sequence[Column],
    rows: Rows,
    *,
    sections: Collection[int] = (),
    **style: Any,
) -> None:
    """Print as many columns as there is room for, and name the others.

    Args:
        console: Where to, and how wide.
        columns: From left to right; the first says what a row is called.
        rows: A cell for each column.
        sections: Rows that a line follows.
        style: Arguments of ``rich.table.Table``.
    """
    from rich.table import Table

    def lines_between(count: int) -> int:
        table = Table(*[""] * count, **style)
        return console.measure(table, options=console.options.update(max_width=_ENDLESS)).maximum

    widths = fit_columns(columns, rows, console.width, lines_between)
    if widths is None:
        _print_stacked(console, columns, rows)
        widths = {at: 0 for at, column in enumerate(columns) if not column.goes}
    else:
        table = Table(**style)
        for at, width in widths.items():
            side: Any = "left" if columns[at].is_left else "right"
            table.add_column(columns[at].name, justify=side, overflow="fold", width=width)
        for number, row in enumerate(rows):
            table.add_row(*(row[at] for at in widths), end_section=number in sections)
        console.print(table)
    if note := left_out_note(columns, widths):
        console.print(note, style="dim")


def fit_columns(
    columns: Sequence[Column], rows: Rows, room: int, lines_between: Callable[[int], int]
) -> dict[int, int] | None:
    """The columns that fit, and the characters of each; None if not even the keys do.

    Args:
        columns: All of them.
        rows: A cell for each column.
        room: Characters of a line.
        lines_between: Characters that n columns need beside their cells.

    >>> columns = [Column("policy", is_left=True), Column("plan", goes=1), Column("skew")]
    >>> rows = [("in-order", "0.2 ms", "1.077")]
    >>> [fit_columns(columns, rows, room, lambda count: 2 * count) for room in (25, 18, 12)]
    [{0: 8, 1: 6, 2: 5}, {0: 8, 2: 5}, None]
    """
    wide = [
        max(_width(cell) for cell in (column.name, *(row[at] for row in rows)))
        for at, column in enumerate(columns)
    ]
    for turn in (0, *sorted({column.goes for column in columns if column.goes})):
        kept = [at for at, column in enumerate(columns) if not 0 < column.goes <= turn]
        widths = {at: min(wide[at], columns[at].wraps or wide[at]) for at in kept}
        spare = room - lines_between(len(kept)) - sum(widths.values())
        if spare < 0:
            continue
        for at in kept:
            more = min(spare, wide[at] - widths[at])
            widths[at] += more
            spare -= more
        return widths
    return None


def left_out_note(columns: Sequence[Column], kept: Collection[int]) -> str:
    """The sentence that names columns there was no room for; empty if all are there."""
    names = [column.name for at, column in enumerate(columns) if at not in kept]
    them = "it" if len(names) == 1 else "them"
    return f"No room for {', '.join(names)}; a wider console shows {them}." if names else ""


def _print_stacked(console: "Console", columns: Sequence[Column], rows: Rows) -> None:
    """A block for each row: its name, and below it a line for each other key with text."""
    from rich.table import Table

    keys = [at for at, column in enumerate(columns) if not column.goes]
    for row in rows:
        console.print(f"{columns[keys[0]].name} {row[keys[0]]}".strip())
        block = Table(box=None, show_header=False, pad_edge=False)
        block.add_column(no_wrap=True)
        block.add_column(overflow="fold")
        for at in keys[1:]:
            if row[at]:
                block.add_row(f"  {columns[at].name}", row[at])
        console.print(block)


def _width(text: str) -> int:
    """Characters of the longest line on a console, where some letters take two."""
    lines = text.splitlines() or [""]
    return max(sum(1 + (east_asian_width(each) in "WF") for each in line) for line in lines)
