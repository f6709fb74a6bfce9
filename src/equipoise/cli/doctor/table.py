"""The rows of ``equipoise doctor``, as a person reads them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.launch.doctor.facts import Row

MARKS = {"ok": "green", "warn": "yellow", "breaks": "red"}


def print_rows(rows: "Sequence[Row]") -> None:
    """A line for each check; below a bad one, why it matters and what to do."""
    from equipoise.cli.console import make_console

    console = make_console()
    width = max((len(row.what) for row in rows), default=0)
    pad = " " * (width + 9)
    for row in rows:
        console.print(f"{row.verdict:<7}", style=MARKS[row.verdict], end="")
        console.print(f"{row.what:<{width}}  {row.found}", soft_wrap=True)
        if row.verdict != "ok":
            console.print(f"{pad}{row.why[0].upper()}{row.why[1:]}", soft_wrap=True)
            console.print(f"{pad}Fix: {row.fix}", soft_wrap=True)
