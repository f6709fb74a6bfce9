"""Find a field by its path, such as ``payload.text`` or ``messages.0.content``.

What it decides
    A key that itself contains dots comes first: at each level the longest key that exists is
    taken. Numbers are places in lists; -1 is the last.

Kept true (tests/unit/data/test_fields.py)
    A field that is missing is reported with the deepest part that exists and its nearest key.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from equipoise.base.nearest import nearest
from equipoise.base.shown import listed, shorten

_PLACE = re.compile(r"-?[0-9]{1,9}")


class MissingFieldError(Exception):
    """A path leads nowhere; the text says how far it goes and what is there."""


def walk(row: Any, path: str) -> Any:
    """The value at a path of a JSON object.

    Raises:
        MissingFieldError: it leads nowhere.

    >>> walk({"a": {"b.c": [1, 2]}}, "a.b.c.-1")
    2
    """
    steps = resolve(row, path, _names, _enter)
    for step in steps:
        row = _enter(row, step)
    return row


def resolve(
    root: Any,
    path: str,
    names_of: Callable[[Any], Sequence[str] | None],
    enter: Callable[[Any, str], Any],
) -> tuple[str, ...]:
    """The keys on the way to a path.

    Args:
        root: Where it begins.
        path: Keys, joined by dots.
        names_of: The keys of a node; None of a node that has none.
        enter: A node below another one, by a key that ``names_of`` lists.

    Raises:
        MissingFieldError: it leads nowhere.
    """
    node, left = root, path
    steps: list[str] = []
    while True:
        names = names_of(node)
        step = None if names is None else _longest(left, names)
        if step is None:
            raise MissingFieldError(_missing(path, ".".join(steps), names))
        steps.append(step)
        if step == left:
            return tuple(steps)
        node, left = enter(node, step), left[len(step) + 1 :]


def _longest(path: str, names: Sequence[str]) -> str | None:
    """The longest key that a path begins with."""
    known = set(names)
    while path and path not in known:
        path = path.rpartition(".")[0]
    return path or None


def _missing(path: str, before: str, names: Iterable[str] | None) -> str:
    where = f' in "{before}"' if before else ""
    if names is None:
        return f'has no field "{path}": "{before}" is neither an object nor a list.'
    keys = list(names)
    if keys and all(map(_PLACE.fullmatch, keys)):
        return f'has no field "{path}": "{before}" is a list of {len(keys) // 2:,}.'
    prefix = f"{before}." if before else ""
    rest = path[len(prefix) :]
    hint = f' Nearest: "{prefix}{shorten(nearest(rest, keys))}".' if any(keys) else ""
    return f'has no field "{path}" among its {len(keys)}{where} ({listed(keys)}).{hint}'


def _names(node: Any) -> list[str] | None:
    if isinstance(node, Mapping):
        return list(node)
    if isinstance(node, list):
        return [str(place) for place in range(-len(node), len(node))]
    return None


def _enter(node: Any, step: str) -> Any:
    return node[step] if isinstance(node, Mapping) else node[int(step)]
