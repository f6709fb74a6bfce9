"""The fields of a request, whatever a notebook put there.

Why
    No annotation keeps a caller from giving NumPy's numbers, a flag or None. A flag counts as 1,
    NumPy's numbers do not go into JSON, and anything else fails deep inside a formula.

Kept true (tests/unit/base/test_fields.py)
    What comes back has Python's own numbers; a value that its field's type does not allow is
    refused by the field's name.
"""

import collections.abc
import dataclasses
import functools
import typing
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar

import numpy as np

from equipoise.base.errors import SpecError
from equipoise.base.shown import shown

Request = TypeVar("Request")
_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    Path: "a Path",
    collections.abc.Mapping: "a dict",
}


def plain_fields(request: Request) -> Request:
    """A request with Python's own numbers, each value of a type that its field allows.

    Args:
        request: A dataclass. Fields that may hold a list are left to those who read it.

    Raises:
        SpecError: a field holds something else; names it.
    """
    changed: dict[str, Any] = {}
    owner: Any = type(request)
    for name, kinds in _kinds(owner).items():
        value = getattr(request, name)
        plain = value.item() if isinstance(value, np.generic) else value
        is_flag, is_whole = type(plain) is bool, type(plain) is int
        is_allowed = isinstance(plain, kinds) or (is_whole and float in kinds)
        if not is_allowed or (is_flag and bool not in kinds):
            words = [_words(kind) for kind in kinds if kind is not NoneType]
            raise SpecError(f"{name} is {shown(plain)}. Give {', or '.join(words)}.")
        if plain is not value:
            changed[name] = plain
    return dataclasses.replace(request, **changed) if changed else request  # type: ignore[type-var]


def is_whole(number: object) -> bool:
    """Whether it is a whole number, Python's or NumPy's, and no flag."""
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def _words(kind: type) -> str:
    return _WORDS.get(kind, f"a {kind.__name__}")


@functools.cache
def _kinds(request: Any) -> dict[str, tuple[type, ...]]:
    """The types that each field allows, without those of fields that may hold a list."""
    hints = typing.get_type_hints(request)
    every = {each.name: tuple(_flat(hints[each.name])) for each in dataclasses.fields(request)}
    return {name: kinds for name, kinds in every.items() if collections.abc.Sequence not in kinds}


def _flat(hint: Any) -> list[type]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, UnionType):
        kinds = [kind for each in typing.get_args(hint) for kind in _flat(each)]
        return list(dict.fromkeys(kinds))
    if origin is Literal:
        return list(dict.fromkeys(map(type, typing.get_args(hint))))
    return [collections.abc.Sequence if origin in (list, tuple) else origin or hint]
