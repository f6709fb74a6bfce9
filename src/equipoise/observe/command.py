"""The command that started a run, from what its journal says of it."""

import re
from collections.abc import Mapping
from typing import Any

_LINE = re.compile(r"(.+):\d+")
"""The origin of a value that a file gave, and its line."""


def asked_words(spec: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """The file and the flags of run.toml's keys that a run was started with.

    Args:
        spec: run.toml as tables.
        origins: Where each came from, as in the journal's ``start``.

    >>> asked_words({"train": {"lr": 0.1}}, {"train.steps": "run.toml:3", "train.lr": "--train.lr"})
    ['run.toml', '--train.lr', '0.1']
    """
    values = flat(spec)
    files = [file[1] for text in origins.values() if (file := _LINE.fullmatch(text))]
    flags = [
        word
        for key, text in origins.items()
        if text == f"--{key}" and key in values
        for word in (text, shown_value(values[key]))
    ]
    return [*files[:1], *flags]


def shown_value(value: object) -> str:
    """A value of run.toml as it would be written there."""
    match value:
        case None:
            return "—"
        case bool():
            return "true" if value else "false"
        case str():
            return value or '""'
        case _:
            return str(value)


def flat(spec: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys.

    >>> flat({"name": "run", "pack": {"policy": "by-work"}})
    {'name': 'run', 'pack.policy': 'by-work'}
    """
    answer: dict[str, Any] = {}
    for key, value in spec.items():
        if isinstance(value, dict):
            answer |= flat(value, f"{prefix}{key}.")
        else:
            answer[f"{prefix}{key}"] = value
    return answer
