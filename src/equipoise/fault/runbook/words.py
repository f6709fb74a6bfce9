"""Words of a guide with its values in place: sentences for people, and commands to run."""

import re
import shlex
from collections.abc import Mapping, Sequence

import numpy as np

from equipoise.base.units import format_bytes, format_seconds
from equipoise.fault.runbook.expression import Value
from equipoise.fault.runbook.lint import SLOT
from equipoise.observe.command import asked_words
from equipoise.observe.journal_lines import Event

RUN_TOML = "run.toml"
"""In a command: the file and the flags that the run was started with."""


def shown(name: str, value: Value) -> str:
    """A value as people read it; the end of its name is its unit.

    >>> shown("wait_s", 0.25), shown("slowest", 1.0), shown("gap_share", 0.123)
    ('250.0 ms', '1', '12.3%')
    >>> shown("newest_at", 1.79e9)
    '2026-09-21 14:13:20 UTC'
    """
    match value:
        case None:
            return "unknown"
        case bool():
            return "yes" if value else "no"
        case int() | float():
            return _number(name, float(value))
        case list():
            return ", ".join(shown("", each) for each in value[:8]) or "none"
        case dict():
            rows = [f"{shown('', key)}: {shown(name, each)}" for key, each in value.items()]
            more = f", {len(rows) - 8} more" if len(rows) > 8 else ""
            return ", ".join(rows[:8]) + more or "none"
    return str(value)


def _number(name: str, value: float) -> str:
    if name.endswith("_s"):
        return format_seconds(value) if value >= 0 else f"-{format_seconds(-value)}"
    if name.endswith("_at"):
        return f"{np.datetime64(int(value), 's')}".replace("T", " ") + " UTC"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_share"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"


def fill(text: str, values: Mapping[str, Value]) -> str:
    """A sentence with ``{name}`` replaced by values.

    >>> fill("Rank {slowest} waits {wait_s}.", {"slowest": 1, "wait_s": 2.0})
    'Rank 1 waits 2.00 s.'
    """
    return SLOT.sub(lambda slot: shown(slot[1], values.get(slot[1])), text)


def unknown_in(words: Sequence[str], values: Mapping[str, Value]) -> list[str]:
    """Names in a command whose values are unknown, or are not one number or text."""
    names = SLOT.findall(" ".join(words))
    return [name for name in names if not isinstance(values.get(name), int | float | str)]


def command_words(
    words: Sequence[str], values: Mapping[str, Value], run: str, start: Event | None
) -> tuple[str, ...]:
    """A command's words for one run.

    Args:
        words: After ``equipoise``, as in the guide.
        values: Of the names in them.
        run: Its folder; takes the place of ``RUN``.
        start: Its journal's ``start``, for the file and the flags of ``run.toml``.

    >>> command_words(("report", "RUN", "--out", "RUN/{name}.html"), {"name": 3.0}, "runs/a", None)
    ('report', 'runs/a', '--out', 'runs/a/3.html')
    """
    answer: list[str] = []
    for word in words:
        if word == RUN_TOML and start is not None:
            spec, origins = start.get("spec"), start.get("origins")
            if isinstance(spec, dict) and isinstance(origins, dict):
                answer += asked_words(spec, {key: str(text) for key, text in origins.items()})
                continue
        filled = SLOT.sub(lambda slot: _plain(values.get(slot[1])), word)
        answer.append(re.sub(r"^RUN(?=/|$)", lambda _: run, filled))
    if RUN_TOML in words and words[0] == "train" and "--out" not in words:
        answer += ["--out", run]
    return tuple(answer)


def _plain(value: Value) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else f"{value:.6g}"
    return str(value)


def as_command(words: Sequence[str]) -> str:
    """A command line that a shell reads back as these words."""
    return shlex.join(("equipoise", *words))
