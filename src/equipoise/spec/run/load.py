"""Turn run.toml and flags into a ResolvedRun, or report all faults at once with their lines.

Why
    A wrong key costs least before the first rank starts, and one list of all faults costs less
    than a run for each.

What it decides
    Later wins: defaults, the base that ``extends`` names, the file, the flags. Relative paths
    refer to the folder of the file, also those given in its base. Environment variables change
    nothing.

Kept true (tests/unit/spec/run/test_load.py)
    Each fault is reported once, at its line.
"""

import codecs
import dataclasses
import functools
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from equipoise.base import read
from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.base.read import read_bytes
from equipoise.base.shown import shorten, shown
from equipoise.spec.limits import MOST_SIZE
from equipoise.spec.recompute import names_modules, refuse_modules
from equipoise.spec.run.faults import describe, explain_fault, refuse_choice, refuse_text
from equipoise.spec.run.keys import (
    EXTENDS,
    RENAMED,
    Fault,
    Given,
    Key,
    Origin,
    choices,
    keys,
    section_names,
    sections,
    to_dict,
    toml,
)
from equipoise.spec.run.mix import read_rows
from equipoise.spec.run.other_words import key_meant, why_absent
from equipoise.spec.run.render import render, schema, template
from equipoise.spec.run.resolve import ResolvedRun, resolve
from equipoise.spec.run.spec import Format, Loss, RunSpec, Source
from equipoise.spec.run.toml_lines import BARE_KEY, TomlPath, locate

__all__ = [
    "ResolvedRun",
    "TomlPath",
    "locate",
    "nearest_key",
    "parse_toml",
    "read_run",
    "render",
    "schema",
    "template",
    "texts_of",
    "to_dict",
]


_RUN, _BASE, _FLAGS = 0, 1, 2  # the order in which faults are reported
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def read_run(path: Path | None, overrides: Sequence[tuple[str, str]] = ()) -> ResolvedRun:
    """The run that a file and flags describe.

    Args:
        path: A run.toml; ``None`` for only the defaults.
        overrides: Pairs of a dotted key and its value's text, from flags. The text is parsed as
            a TOML value, or else taken literally; for a key of type text always literally.

    Raises:
        SpecError: all faults of the file, its base and the flags, one line each.

    >>> run = read_run(None, [("train.steps", "50")])
    >>> run.spec.train.steps, run.origins["train.steps"], run.origins["train.lr"]
    (50, '--train.steps', 'default')
    """
    faults: list[Fault] = []
    layers: list[dict[str, Given]] = []
    base = Path.cwd()
    if path is not None:
        base = path.absolute().parent
        layers = [*_read_layers(path, faults)]
    layers.append(_read_flags(overrides, faults))
    notes: list[str] = []
    layers = [_rename(layer, notes, faults) for layer in layers]

    given: dict[str, Given] = {}
    faulty: set[str] = set()
    for layer in layers:  # a later layer overrides an earlier one
        for name, each in layer.items():
            value, message = judge(keys()[name], each.value)
            given.pop(name, None)
            faulty.discard(name)
            if message is None:
                given[name] = Given(value, each.origin)
            else:
                faulty.add(name)
                faults.append(Fault(each.origin, name, message))
    run, more = resolve(given, faulty, base)
    if faults := sorted([*faults, *more], key=lambda fault: fault.origin.order):
        # A recommender's other keys are not wrong: this verb does not read such runs.
        faults = [each for each in faults if each.key == "model.kind"] or faults
        raise SpecError("\n".join(map(str, faults)))
    return dataclasses.replace(run, notes=tuple(notes))


def texts_of(spec: RunSpec) -> list[tuple[str, str]]:
    """A spec as the overrides that ``read_run`` takes: what is not a default.

    Paths count as their names, and NumPy's numbers as plain ones.

    Raises:
        SpecError: a table or a value is of another kind than any that a file can hold.

    >>> texts_of(RunSpec(name="mine"))
    [('name', 'mine')]
    """
    texts = []
    for name, key in keys().items():
        table = getattr(spec, key.section) if key.section else spec
        if not hasattr(table, key.field):
            raise SpecError(
                f"{key.section} of the RunSpec is {shown(table)}. Give a "
                f"{sections()[key.section].__name__}."
            )
        value = getattr(table, key.field)
        try:
            plain = value.item() if hasattr(value, "item") else value
            plain = os.fspath(plain) if isinstance(plain, os.PathLike) else plain
            if plain != key.default:
                texts.append((name, plain if isinstance(plain, str) else toml(plain)))
        except (TypeError, ValueError, RuntimeError):  # the last of a tensor
            raise SpecError(
                f"{name} of the RunSpec is {shown(value)}. Give what run.toml can hold: a number, "
                f"a text, a flag, or a tuple of texts."
            ) from None
    return texts


def nearest_key(name: str) -> str:
    """The key or table that a wrong dotted name most likely meant.

    >>> nearest_key("train.max_tokens"), nearest_key("layout.ddp"), nearest_key("batch_size")
    ('pack.max_tokens', 'layout.dp', 'pack.step_tokens')
    """
    if (meant := key_meant(name)) is not None:
        return meant
    names = [*keys(), *section_names(), EXTENDS]
    last = name.rpartition(".")[2]
    alike = [other for other in names if other.rpartition(".")[2] == last]
    return nearest(name, alike or names)


def _rename(layer: dict[str, Given], notes: list[str], faults: list[Fault]) -> dict[str, Given]:
    """A layer under present key names; notes old names, and faults a key given under both."""
    renamed: dict[str, Given] = {}
    for name, each in layer.items():
        new = RENAMED.get(name, name)
        if new != name and new in layer:
            faults.append(Fault(each.origin, name, f"the old name of {new}, which is given too."))
            continue
        if new != name:
            flag = "--" if each.origin.is_flag else ""
            where = "" if each.origin.is_flag else f"{each.origin.label}  "
            notes.append(f"{where}{flag}{name} is now {flag}{new}; 0.2 drops the old name.")
        renamed[new] = each
    return renamed


def _read_layers(path: Path, faults: list[Fault]) -> Iterator[dict[str, Given]]:
    """The values of a file's base, if it extends one, then its own."""
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        raise SpecError(
            f'No such file: {path}. "equipoise init" writes a run.toml to start from.'
        ) from None
    except OSError as error:
        raise SpecError(f"Cannot read {path}: {(error.strerror or str(error)).lower()}.") from None
    table, lines = parse_toml(data, path.name)
    extends = table.pop(EXTENDS, None)
    if extends is not None:
        origin = Origin(f"{path.name}:{lines[EXTENDS,]}", (_RUN, lines[EXTENDS,]))
        yield _read_base(path, extends, origin, faults)
    yield _collect(table, lines, path.name, _RUN, faults)


def _read_base(path: Path, extends: Any, origin: Origin, faults: list[Fault]) -> dict[str, Given]:
    if not isinstance(extends, str):
        faults.append(Fault(origin, EXTENDS, f"needs text, got {describe(extends)}."))
        return {}
    try:
        table, lines = parse_toml(read_bytes(path.parent / extends), extends)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        faults.append(Fault(origin, EXTENDS, f"cannot read {toml(extends)}: {reason}."))
        return {}
    except SpecError as error:
        faults.append(Fault(origin, EXTENDS, str(error)))
        return {}
    if table.pop(EXTENDS, None) is not None:
        line = lines[EXTENDS,]
        faults.append(
            Fault(
                Origin(f"{extends}:{line}", (_BASE, line)),
                EXTENDS,
                f"{path.name} extends this file, so it cannot extend another; "
                "one level is allowed.",
            )
        )
    return _collect(table, lines, extends, _BASE, faults)


def parse_toml(data: bytes, label: str) -> tuple[dict[str, Any], dict[TomlPath, int]]:
    """The table of a TOML file, and the line of each of its keys.

    Raises:
        SpecError: not UTF-8, not TOML, or with absurd nesting or numbers; names the line of the
            file ``label`` if one is at fault.
    """
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        return read.parse_toml(text), locate(text)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{label}:{line}  not UTF-8 text. Save the file as UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        # "Expected '=' after a key in a key/value pair (at line 1, column 5)"
        place_of = re.fullmatch(
            r"(.*) \(at (?:line (\d+), (column \d+)|.*)\)", str(error), re.DOTALL
        )
        what, line_text, column = place_of.groups() if place_of else (str(error), None, None)
        line = int(line_text or text.rstrip().count("\n") + 1)
        place = column or "end of the file"
        raise SpecError(f"{label}:{line}  not TOML: {what} ({place}).") from None
    except ValueError as error:
        raise SpecError(f"{label} cannot be read: {error}.") from None


def _collect(
    table: Mapping[str, Any],
    lines: Mapping[TomlPath, int],
    label: str,
    order: int,
    faults: list[Fault],
) -> dict[str, Given]:
    """The known keys of a parsed file; unknown ones become faults."""
    given: dict[str, Given] = {}

    def origin(*path: str) -> Origin:
        return Origin(f"{label}:{lines[path]}", (order, lines[path]))

    def refuse(path: tuple[str, ...], names: Sequence[str] = ()) -> None:
        name = ".".join(path)
        meant = nearest(path[-1], names) if names else nearest_key(name)
        message = why_absent(name) or f"no such key. Nearest: {meant}"
        faults.append(Fault(origin(*path), _dotted(path), message))

    for name, value in table.items():
        if name in section_names():
            if not isinstance(value, dict):
                message = f"needs a table, got {describe(value)}."
                faults.append(Fault(origin(name), name, message))
                continue
            for field, item in value.items():
                if (dotted := f"{name}.{field}") in keys() or dotted in RENAMED:
                    given[dotted] = Given(item, origin(name, field))
                else:
                    refuse((name, field))
        elif name in keys() and not keys()[name].section:
            given[name] = Given(value, origin(name))
        else:
            refuse((name,), section_names() if isinstance(value, dict) else ())
    return given


def _read_flags(overrides: Sequence[tuple[str, str]], faults: list[Fault]) -> dict[str, Given]:
    given: dict[str, Given] = {}
    for place, (name, text) in enumerate(overrides):
        origin = Origin(f"--{name}", (_FLAGS, place))
        if name not in keys() and name not in RENAMED:
            meant = nearest(name, keys()) if name in section_names() else nearest_key(name)
            message = why_absent(name) or f"no such key. Nearest: --{meant}"
            faults.append(Fault(origin, name, message))
            continue
        allowed = choices(keys()[RENAMED.get(name, name)])
        is_text = all(each is str or isinstance(each, str) for each in allowed)
        given[name] = Given(text if is_text else _read_value(text), origin)
    return given


def _read_value(text: str) -> Any:
    try:
        table = read.parse_toml(f"value = {text}")
    except ValueError:
        return text
    return table["value"] if len(table) == 1 else text


def _dotted(path: Sequence[str]) -> str:
    return ".".join(shorten(part if BARE_KEY.fullmatch(part) else toml(part)) for part in path)


@functools.cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(keys()[name].annotation, config=_STRICT)


_UNLIMITED = ("train.seed",)
"""Integer keys that are not sizes; all others are at most ``MOST_SIZE``."""


def judge(key: Key, value: Any) -> tuple[Any, str | None]:
    """A value in its key's type, or what is wrong with it."""
    if key.name == "data.mix":
        kinds = {"source": Source, "format": Format, "loss": Loss}
        return read_rows(value, {name: get_args(kind) for name, kind in kinds.items()})
    allowed = choices(key)
    if isinstance(value, str) and (message := refuse_text(value)) is not None:
        return None, message
    if not any(isinstance(each, type) for each in allowed):
        # Pydantic's literals take True and 1.0 for 1, also when strict.
        if any(type(each) is type(value) and each == value for each in allowed):
            return value, None
        if key.name == "train.recompute" and names_modules(value):
            return None, refuse_modules(value)
        return None, refuse_choice(allowed, value)
    if tuple in allowed:  # one text stands for a list of it
        value = (value,) if isinstance(value, str) else tuple(value) if _is_texts(value) else value
    try:
        judged = _adapter(key.name).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return None, explain_fault(allowed, value, first["type"], first.get("ctx", {}))
    is_count = isinstance(judged, int) and key.name not in _UNLIMITED
    if is_count and abs(judged) > MOST_SIZE:
        return None, explain_fault(allowed, value, "less_than_equal", {"le": MOST_SIZE})
    return judged, None


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
