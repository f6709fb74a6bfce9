"""``equipoise systems``: which of the published systems work here, and which do not yet."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from itertools import zip_longest
from shutil import get_terminal_size
from textwrap import wrap

from equipoise.base.registry import System, find, systems
from equipoise.cli.console import width_off_terminal
from equipoise.cli.table import Column, fit_columns, left_out_note

HELP = "list the published systems that equipoise unites, and which of them work"

EXAMPLES = """\
examples:
  equipoise systems                all of them
  equipoise systems WLB-LLM        one of them: what it does, what works, what is missing
  equipoise systems 34
  equipoise systems --json
"""

_ENDLESS = 1_000
"""Columns off a terminal: a line for each system, for grep."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="name or number of one system")


def run(args: argparse.Namespace) -> int:
    """Print the table, or one system."""
    shown = systems() if args.name is None else (find(args.name),)
    if args.json:
        rows = [{**dataclasses.asdict(each), "state": each.state} for each in shown]
        answer = rows if args.name is None else rows[0]
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    elif args.name is None:
        _print_table(shown, summary_only=args.quiet)
    else:
        sys.stdout.write(_one(shown[0]))
    return 0


def _print_table(shown: tuple[System, ...], *, summary_only: bool) -> None:
    if not summary_only:
        columns = (
            Column("#"),
            Column("state", is_left=True),
            Column("system", is_left=True, wraps=24),
            Column("tier", is_left=True, goes=1),
            Column("home", is_left=True, goes=2, wraps=16),
            Column("command", is_left=True, goes=3, wraps=30),
        )
        rows = [
            (str(each.number), each.state, each.name, each.tier, each.home, each.command or "")
            for each in shown
        ]
        sys.stdout.write(_lines(columns, rows))
    states = [each.state for each in shown]
    sys.stdout.write(
        f"{len(shown)} systems: {states.count('works')} work, {states.count('part')} work in "
        f"part, {states.count('not yet')} do not yet.\n"
    )


def _lines(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """The table as text, without rich, which takes longer to load than this verb to answer."""
    is_terminal = sys.stdout.isatty()
    room = get_terminal_size().columns if is_terminal else width_off_terminal(_ENDLESS)
    widths = fit_columns(columns, rows, room, lambda count: 2 * (count - 1))
    if widths is None:  # lines longer than the terminal, which breaks them
        widths = {
            at: max(len(row[at]) for row in rows)
            for at in range(len(columns))
            if not columns[at].goes
        }
    lines = []
    for row in ([column.name for column in columns], *rows):
        cells = [
            wrap(row[at], width, break_on_hyphens=False) or [""] for at, width in widths.items()
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            line = zip(parts, widths.items(), strict=True)
            aligned = (
                f"{part:{'<' if columns[at].is_left else '>'}{width}}" for part, (at, width) in line
            )
            lines.append("  ".join(aligned).rstrip())
    return "\n".join([*lines, left_out_note(columns, widths), ""])


def _one(system: System) -> str:
    rows = {
        "state": system.state,
        "what it does": system.mechanism,
        "home": system.home,
        "tier": system.tier,
        "command": system.command,
        "test": system.test,
        "last result": system.result,
        "missing": system.missing,
    }
    lines = (f"  {name:<12}  {text}" for name, text in rows.items() if text is not None)
    return "\n".join([f"{system.number}. {system.name}", *lines]) + "\n"
