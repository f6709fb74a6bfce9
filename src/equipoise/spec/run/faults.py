"""A value of run.toml that its key does not allow, as a sentence.

What it decides
    Words for pydantic's kinds of faults, shared by every kind of run and by the files that are read
    beside one. No sentence shows a value as Python writes it.

Kept true (tests/unit/spec/run/test_load.py, tests/unit/spec/test_recommend.py)
    A fault names the value and what its key takes.
"""

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from equipoise.base.nearest import nearest
from equipoise.base.shown import shorten
from equipoise.spec.run.keys import flatten, item_of, toml


def refuse_text(text: str) -> str | None:
    """What is wrong with the characters of a text, if anything."""
    if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
        return "the value has bytes that are not UTF-8."
    if "\0" in text:
        return f"{shorten(toml(text))} has a NUL character, which no text here can hold."
    return None


def explain_refusal(annotation: Any, error: ValidationError) -> str:
    """A sentence for the first fault of a value, which may lie in an item of a list."""
    first = error.errors(include_url=False)[0]
    value, kind, items = first["input"], first["type"], ""
    for place in first["loc"]:
        inner = item_of(annotation)
        if isinstance(place, int) and inner is not None:
            annotation, items = inner, f"{items}item {place + 1}: "
    if item_of(annotation) is not None and kind in ("tuple_type", "list_type"):
        return f"{items}needs a list, got {describe(value)}."
    allowed = flatten(annotation)
    if kind == "literal_error" or not any(isinstance(each, type) for each in allowed):
        return f"{items}{refuse_choice(allowed, value)}"
    return f"{items}{explain_fault(allowed, value, kind, first.get('ctx', {}))}"


def refuse_choice(allowed: Sequence[Any], value: Any) -> str:
    """A sentence for a value that is not one of those allowed."""
    options = ", ".join(toml(each) for each in allowed)
    if isinstance(value, dict | list):
        return f"needs one of {options}, got {describe(value)}."
    is_date = isinstance(value, datetime.date | datetime.time)
    shown = value.isoformat() if is_date else toml(value)
    return f"{shorten(shown)} is not one of {options}.{_hint(allowed, value)}"


def _hint(allowed: Sequence[Any], value: Any) -> str:
    words = [each for each in allowed if isinstance(each, str)]
    return f" Nearest: {toml(nearest(value, words))}." if words and isinstance(value, str) else ""


_BOUNDS = {
    "greater_than_equal": ("ge", "small; it must be at least"),
    "greater_than": ("gt", "small; it must be more than"),
    "less_than_equal": ("le", "large; it must be at most"),
    "less_than": ("lt", "large; it must be less than"),
}
_LONG_NUMBER = re.compile(r"-?\d{19,}")
"""A flag's whole number that TOML could not hold, and that therefore stayed text."""
_WANTED = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    tuple: "a list of texts",
}


def explain_fault(allowed: Sequence[Any], value: Any, kind: str, context: Mapping[str, Any]) -> str:
    """A sentence for one of pydantic's error types."""
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        limit = context[bound]
        if isinstance(limit, float) and limit.is_integer():
            limit = int(limit)
        return f"{shorten(toml(value))} is too {words} {limit}."
    if kind == "finite_number":
        return f"{shorten(str(value))} is not a finite number."
    if kind == "string_pattern_mismatch":  # only ``name`` has a pattern
        return (
            f'{shorten(toml(value))} is not a name. Use letters, digits, ".", "_" and "-", '
            "and begin with a letter or a digit."
        )
    if int in allowed and isinstance(value, str) and _LONG_NUMBER.fullmatch(value):
        return f"{shorten(value)} is too large; 64 bits do not hold it."
    wanted = " or ".join(_WANTED.get(each) or toml(each) for each in allowed)
    return f"needs {wanted}, got {describe(value)}.{_hint(allowed, value)}"


def describe(value: Any) -> str:
    """A value of the wrong type, with its type."""
    match value:
        case bool():
            return f"{toml(value)} (true or false)"
        case int():
            return f"{shorten(str(value))} (a whole number)"
        case float():
            return f"{value} (a number)"
        case str():
            return f"{shorten(toml(value))} (text)"
        case datetime.date() | datetime.time():
            return f"{value.isoformat()} (a date or a time)"
        case list() | tuple():
            return "a list"
        case _:
            return "a table"
