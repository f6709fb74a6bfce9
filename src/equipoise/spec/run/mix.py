"""The rows of ``[[data.mix]]``: sources that are mixed, each with its weight.

Kept true (tests/unit/spec/run/test_mix.py)
    A wrong row is refused with its number, its key and the nearest right answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import Field

from equipoise.base.nearest import nearest
from equipoise.base.shown import shown

MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class MixRow:
    """One source of a mixture."""

    path: Annotated[str, Field(description="as data.path")] = ""
    weight: Annotated[float, Field(gt=0, description="share of trained tokens, relative")] = 1.0
    source: Annotated[str | None, Field(description="as data.source, which it is else")] = None
    field: Annotated[str | None, Field(description="as data.field, which it is else")] = None


def read_rows(value: Any, sources: tuple[str, ...]) -> tuple[tuple[MixRow, ...], str | None]:
    """The rows of a value in run.toml, or what is wrong with the first wrong one.

    Args:
        value: What was given.
        sources: The kinds of source that there are.
    """
    if isinstance(value, tuple) and all(isinstance(row, MixRow) for row in value):
        return value, None
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        return (), 'needs tables, as in [[data.mix]] or [{path = "a.jsonl", weight = 2}].'
    if len(value) > MOST_ROWS:
        return (), f"{len(value):,} sources are too many; there may be at most {MOST_ROWS}."
    rows = []
    for number, row in enumerate(value, start=1):
        message = _fault(row, sources)
        if message is not None:
            return (), f"source {number}: {message}"
        rows.append(MixRow(**{**row, "weight": float(row.get("weight", 1.0))}))
    return tuple(rows), None


def _fault(row: Mapping[str, Any], sources: tuple[str, ...]) -> str | None:
    names = [each.name for each in fields(MixRow)]
    for name in row:
        if name not in names:
            return f"{shown(name)}: no such key. Nearest: {nearest(name, names)}"
    for name in ("path", "source", "field"):
        if name in row and (not isinstance(row[name], str) or "\0" in row[name]):
            return f"{name} needs text, got {shown(row[name])}."
    if row.get("source", sources[0]) not in sources:
        options = ", ".join(map(shown, sources))
        return (
            f"source = {shown(row['source'])} is not one of {options}. Nearest: "
            f'"{nearest(row["source"], sources)}".'
        )
    weight = row.get("weight", 1.0)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 < weight < float("inf"):
        return f"weight = {shown(weight)} is not a share; give a number above 0."
    return None
