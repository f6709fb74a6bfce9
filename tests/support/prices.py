"""Prices as ``simulate`` prints them and as a plan keeps them."""

from typing import Any


def without_doubts(row: dict[str, Any]) -> dict[str, Any]:
    """A row of ``simulate --json`` without how sure it is, which a plan's price leaves out."""
    return {key: row[key] for key in row if key not in ("doubts", "interval", "spreads")}
