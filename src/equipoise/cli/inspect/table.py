"""The facts of ``equipoise inspect``, as a person reads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from equipoise.base.units import format_bytes, format_count
from equipoise.cli.console import make_console
from equipoise.cli.table import Column, print_columns


def print_facts(facts: Mapping[str, Any]) -> None:
    """A line for each fact; for a run, a table of its checkpoints below."""
    console = make_console(False)
    table = Table(show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in facts.items():
        if key != "checkpoints":
            table.add_row(_label(key), _shown(key, value))
    console.print(table)
    if checkpoints := facts.get("checkpoints"):
        columns = (
            Column("checkpoint", is_left=True),
            Column("step"),
            Column("ranks", goes=1),
            Column("size"),
            Column("state", is_left=True, wraps=14),
        )
        rows = [
            (
                Path(each["path"]).name,
                _shown("step", each.get("step")),
                _shown("ranks", each.get("ranks")),
                format_bytes(each["size_bytes"]),
                each["state"],
            )
            for each in checkpoints
        ]
        print_columns(console, columns, rows)


def _label(key: str) -> str:
    return key.removesuffix("_bytes").replace("_", " ")


def _shown(key: str, value: Any) -> str:
    if value is None or value in ([], {}):
        return "-"
    if key.endswith("_bytes"):
        return format_bytes(value)
    if key == "params":
        return f"{format_count(value)} ({value:,})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"
    if isinstance(value, dict):
        inner = (
            f"{name} ({_shown(name, each)})"
            if isinstance(each, dict)
            else f"{name} {_shown(name, each)}"
            for name, each in value.items()
        )
        return ", ".join(inner)
    if isinstance(value, list):
        return "\n".join(str(each) for each in value)
    return str(value)
