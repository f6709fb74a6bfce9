"""Every key of run.toml, where a value was given, and how a value is written.

What it decides
    Keys are the fields of ``RunSpec``; nothing is listed twice.

Kept true (tests/unit/spec/run/test_resolve.py)
    Each key has a section, a default and a description.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from equipoise.spec.run.spec import RunSpec

EXTENDS = "extends"
EXTENDS_DESCRIPTION = "another run.toml with the values that this file omits; one level"

RENAMED = {
    "layout.context": "layout.cp",
    "layout.tensor": "layout.tp",
    "layout.pipeline": "layout.pp",
    "layout.expert": "layout.ep",
    "layout.expert_tensor": "layout.etp",
}
"""Present names of version 0.1's keys, which version 0.2 no longer accepts."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of run.toml."""

    name: str
    """Dotted: ``train.steps``."""
    section: str
    """``train``, or empty for a key outside every table."""
    field: str
    """``steps``."""
    annotation: Any
    default: Any
    description: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from, and its place in the order of reported faults."""

    label: str
    order: tuple[int, int]

    @property
    def is_flag(self) -> bool:
        """Whether a command-line flag gave the value."""
        return self.label.startswith("--")


DEFAULT = Origin("default", (9, 0))


@dataclass(frozen=True, slots=True)
class Given:
    """A value and where it was given."""

    value: Any
    origin: Origin


@dataclass(frozen=True, slots=True)
class Fault:
    """One error at one place."""

    origin: Origin
    key: str
    message: str

    def __str__(self) -> str:
        if self.origin.is_flag:
            return f"{self.origin.label}: {self.message}"
        return f"{self.origin.label}  {self.key}: {self.message}"


def rename_keys(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a run that an earlier version wrote, under today's names of keys.

    >>> rename_keys({"name": "run", "layout": {"dp": 2, "context": 4}})
    {'name': 'run', 'layout': {'dp': 2, 'cp': 4}}
    """
    return {
        section: {
            RENAMED.get(f"{section}.{field}", f".{field}").partition(".")[2]: value
            for field, value in table.items()
        }
        if isinstance(table, Mapping)
        else table
        for section, table in spec.items()
    }


@functools.cache
def keys() -> dict[str, Key]:
    """Every key of run.toml by its dotted name, in the order of RunSpec.

    >>> keys()["train.steps"].default, keys()["name"].section
    (100, '')
    """
    by_name: dict[str, Key] = {}
    for section, kind in sections().items():
        hints = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            if get_origin(hints[field.name]) is not Annotated:
                continue
            name = f"{section}.{field.name}" if section else field.name
            info = next(x for x in get_args(hints[field.name])[1:] if isinstance(x, FieldInfo))
            by_name[name] = Key(
                name=name,
                section=section,
                field=field.name,
                annotation=hints[field.name],
                default=field.default,
                description=info.description or "",
            )
    return by_name


@functools.cache
def sections() -> dict[str, Any]:
    """The dataclass of each table; the file itself is the unnamed table."""
    tables = {field.name: field.type for field in dataclasses.fields(RunSpec)}
    return {"": RunSpec} | {
        name: kind for name, kind in tables.items() if dataclasses.is_dataclass(kind)
    }


def section_names() -> list[str]:
    """The tables of run.toml, in order."""
    return [name for name in sections() if name]


def to_dict(spec: RunSpec) -> dict[str, Any]:
    """The run as plain data: a dict of each table."""
    return dataclasses.asdict(spec)


def build(values: Mapping[str, Any]) -> RunSpec:
    """The RunSpec with a value for every dotted key."""
    tables: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    for name, key in keys().items():
        tables[key.section][key.field] = values[name]
    return RunSpec(
        **tables[""], **{name: sections()[name](**tables[name]) for name in section_names()}
    )


def toml(value: Any) -> str:
    """A scalar, or a list of texts or tables, as TOML writes it on one line.

    >>> toml(True), toml(3e-3), toml("a"), toml(("a", "b")), toml(float("inf"))
    ('true', '0.003', '"a"', '["a", "b"]', 'inf')
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if dataclasses.is_dataclass(value):
        items = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
        given = ", ".join(f"{name} = {toml(item)}" for name, item in items if item is not None)
        return f"{{{given}}}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value)


def choices(key: Key) -> list[Any]:
    """The types and literal values that a key allows, without ``None``.

    >>> choices(keys()["layout.dp"])
    [<class 'int'>, 'cores']
    """
    return flatten(key.annotation)


def flatten(annotation: Any) -> list[Any]:
    """The types and literal values that an annotation allows."""
    if get_origin(annotation) is Annotated:
        return flatten(get_args(annotation)[0])
    if get_origin(annotation) is tuple:
        return [tuple]
    if arguments := get_args(annotation):
        return [leaf for each in arguments for leaf in flatten(each)]
    return [] if annotation in (type(None), ...) else [annotation]


def item_of(annotation: Any) -> Any:
    """What a list holds by its annotation; ``None`` for what is not a list.

    >>> item_of(tuple[str, ...]), item_of(int)
    (<class 'str'>, None)
    """
    if get_origin(annotation) is Annotated:
        return item_of(get_args(annotation)[0])
    return get_args(annotation)[0] if get_origin(annotation) is tuple else None
