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
    format: Annotated[str | None, Field(description="as data.format, which it is else")] = None
    loss: Annotated[str | None, Field(description="as data.loss, which it is else")] = None


def read_rows(
    value: Any, options: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[MixRow, ...], str | None]:
    """The rows of a value in run.toml, or what is wrong with the first wrong one.

    Args:
        value: What was given.
        options: What ``source``, ``format`` and ``loss`` may be.
    """
    if isinstance(value, tuple) and all(isinstance(row, MixRow) for row in value):
        return value, None
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        return (), 'needs tables, as in [[data.mix]] or [{path = "a.jsonl", weight = 2}].'
    if len(value) > MOST_ROWS:
        return (), f"{len(value):,} sources are too many; there may be at most {MOST_ROWS}."
    rows = []
    for number, row in enumerate(value, start=1):
        message = _fault(row, options)
        if message is not None:
            return (), f"source {number}: {message}"
        rows.append(MixRow(**{**row, "weight": float(row.get("weight", 1.0))}))
    return tuple(rows), None


def _fault(row: Mapping[str, Any], options: Mapping[str, tuple[str, ...]]) -> str | None:
    names = [each.name for each in fields(MixRow)]
    for name in row:
        if name not in names:
            return f"{shown(name)}: no such key. Nearest: {nearest(name, names)}"
    for name in ("path", "field", *options):
        if name in row and (not isinstance(row[name], str) or "\0" in row[name]):
            return f"{name} needs text, got {shown(row[name])}."
    for name, allowed in options.items():
        if row.get(name, allowed[0]) not in allowed:
            return (
                f"{name} = {shown(row[name])} is not one of {', '.join(map(shown, allowed))}. "
                f'Nearest: "{nearest(row[name], allowed)}".'
            )
    weight = row.get("weight", 1.0)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 < weight < float("inf"):
        return f"weight = {shown(weight)} is not a share; give a number above 0."
    return None
