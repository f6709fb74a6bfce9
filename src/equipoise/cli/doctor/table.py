"""The rows of ``equipoise doctor``, as a person reads them."""

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.launch.doctor.facts import Row

MARKS = {"ok": "green", "warn": "yellow", "breaks": "red"}

_VERDICT = max(map(len, MARKS))
_ENDLESS = 10_000
"""Columns off a terminal: a line for each check, for grep."""
_FEWEST = 30
"""Columns that a sentence needs beside the name of its check; with fewer it stands below."""


def print_rows(rows: "Sequence[Row]") -> None:
    """A line for each check; below a bad one, why it matters and what to do.

    Sentences that are longer than the console is wide go on below their own beginning.
    """
    from equipoise.cli.console import make_console, width_off_terminal

    console = make_console()
    room = console.width if console.is_terminal else width_off_terminal(_ENDLESS)
    names = max((len(row.what) for row in rows), default=0)
    indent = _VERDICT + 1 + names + 2
    if room - indent < _FEWEST:
        indent = _VERDICT + 1
    for row in rows:
        said = f"{row.verdict:<{_VERDICT}} {row.what:<{names}}  "
        lines = _hang(said, row.found, indent, room)
        if row.verdict != "ok":
            lines += _hang(" " * indent, f"{row.why[0].upper()}{row.why[1:]}", indent, room)
            lines += _hang(" " * indent, f"Fix: {row.fix}", indent, room)
        console.print(lines[0][:_VERDICT], style=MARKS[row.verdict], end="", soft_wrap=True)
        console.print("\n".join((lines[0][_VERDICT:], *lines[1:])), soft_wrap=True)


def _hang(before: str, text: str, indent: int, room: int) -> list[str]:
    """A text as lines, the first behind ``before``, the others below it; no word is broken."""
    return wrap(
        text,
        room,
        initial_indent=before,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
