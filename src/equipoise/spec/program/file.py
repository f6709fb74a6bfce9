"""program.toml: what a training program can run and how, each fact with its source.

What it decides
    The file's form; ``like`` names a program whose facts hold where the file gives none::

        title = "our fork"
        like = "megatron-core"

        [runs]
        schedules = ["1f1b"]         # an empty list: it has no such thing

        [stack]
        sum_bytes = 8.0              # a field of spec.program.stack.Stack

        [sources]
        schedules = "our docs"       # a sentence for each fact above
        sum_bytes = "profile of March"

Kept true (tests/unit/spec/program/test_file.py)
    Each fault is reported once, with its line; every given fact has a source.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.base.read import read_bytes
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.file_faults import explain_file_fault
from equipoise.spec.program.spec import DEFAULT, ProgramSpec
from equipoise.spec.program.stack import Stack
from equipoise.spec.recompute import Module
from equipoise.spec.run.load import TomlPath, parse_toml
from equipoise.spec.run.spec import Recompute

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_Share = Annotated[float, Field(ge=0, le=1)]
_Bytes = Annotated[float, Field(ge=0, le=1e6)]
_MOVED = (
    *("norm_bytes", "rotation_bytes", "scaled_rotation_bytes", "sum_bytes", "logit_bytes"),
    *("merge_bytes", "bias_gate_bytes", "bias_row_bytes", "bias_kept_bytes"),
)
_LIMITS: dict[str, Any] = {
    "tensor_overlap": _Share,
    "dispatch_share": _Share,
    "rails": Annotated[float, Field(gt=0, le=1)],
    "slack_share": _Share,
    "host_launch_s": _Share,
    "host_experts_s": _Share,
    "grad_bytes": Literal[2, 4],
    **dict.fromkeys(_MOVED, _Bytes),
}
"""What a field may be, where its type alone does not say so."""

_FIELDS: dict[str, Any] = {
    each.name: (_LIMITS.get(each.name, each.type), each.default)
    for each in dataclasses.fields(Stack)
}
if TYPE_CHECKING:  # a type checker cannot read fields off another class
    _Stack = BaseModel
else:
    _Stack = create_model("_Stack", __config__=_STRICT, **_FIELDS)


class _Runs(BaseModel):
    model_config = _STRICT
    order: Annotated[list[Literal["dp-pp", "pp-dp"]], Field(min_length=1)] | None = None
    schedules: list[Literal[*SCHEDULES]] | None = None  # type: ignore[valid-type]
    recompute: Annotated[list[Recompute], Field(min_length=1)] | None = None
    modules: list[Module] | None = None
    context: list[Literal["needed-kv", "all-gather", "ring", "ulysses"]] | None = None
    precision: Annotated[list[Literal["bf16", "fp8", "fp32"]], Field(min_length=1)] | None = None
    zero: Annotated[list[Literal[0, 1, 2, 3]], Field(min_length=1)] | None = None
    sharding: Literal["mixed", "head-tail"] | None = None


class _Program(BaseModel):
    model_config = _STRICT
    title: str
    like: str | None = None
    runs: _Runs = _Runs()
    stack: _Stack = _Stack()
    sources: dict[str, str] = {}


@functools.cache
def _files() -> dict[str, Any]:
    """Files of shipped programs, by name."""
    folder = resources.files("equipoise.spec.program") / "shipped"
    files = (
        file for each in folder.iterdir() for file in (each.iterdir() if each.is_dir() else [each])
    )
    return {file.name.removesuffix(".toml"): file for file in files}


@functools.cache
def program_names() -> tuple[str, ...]:
    """Shipped programs, by name."""
    return tuple(sorted(_files(), key=lambda name: (name != DEFAULT, name)))


def read_program(text: str | ProgramSpec) -> ProgramSpec:
    """The program that a command line names: a shipped one, or a program.toml.

    Raises:
        SpecError: no such program or file, or all faults of the file, one line each.

    >>> read_program("megatron-core").order, read_program("equipoise").stack == Stack()
    ('pp-dp', True)
    """
    if isinstance(text, ProgramSpec):
        return text
    if text in program_names():
        return _shipped(text)
    if not text.endswith(".toml"):
        raise SpecError(
            f'No program is called "{text}". Nearest: {nearest(text, program_names())}. Known: '
            f"{', '.join(program_names())}; any other is a program.toml."
        )
    path = Path(text)
    try:
        data = read_bytes(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SpecError(
            f"Cannot read the program file {path}: {reason}. Shipped programs need no file: "
            f"{', '.join(program_names())}."
        ) from None
    return _read(path.stem, data, path.name)


@functools.cache
def _shipped(name: str) -> ProgramSpec:
    return _read(name, _files()[name].read_bytes(), f"{name}.toml")


def _read(name: str, data: bytes, label: str) -> ProgramSpec:
    table, lines = parse_toml(data, label)
    faults: list[tuple[int, str]] = []

    def add(path: TomlPath, message: str) -> None:
        known = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in lines), None)
        named = ".".join(part for part in path if isinstance(part, str))
        line = 1 if known is None else lines[known]
        faults.append((line, f"{label}:{line}  {named}: {message}"))

    file = _Program.model_construct(title="")
    try:
        file = _Program.model_validate(table)
    except ValidationError as error:
        seen: set[TomlPath] = set()
        for each in error.errors(include_url=False):
            path = each["loc"][:2]  # a list's items share its line
            if path not in seen:
                seen.add(path)
                add(path, _explain(path, dict(each)))
    else:
        _judge(file, add)
    if faults:
        raise SpecError("\n".join(text for _, text in sorted(faults)))
    base = _shipped(file.like) if file.like is not None else None
    return _build(name, file, base)


def _judge(file: _Program, add: Callable[[TomlPath, str], None]) -> None:
    """Refuse an unknown base, facts without a source, and sources of no fact."""
    shipped = program_names()
    if file.like is not None and file.like not in shipped:
        near = nearest(file.like, shipped)
        add(("like",), f'there is no program "{file.like}". Nearest: {near}')
    rooms = {"runs": file.runs.model_fields_set, "stack": file.stack.model_fields_set}
    given = [(room, name) for room, names in rooms.items() for name in sorted(names)]
    for room, name in given:
        if not file.sources.get(name):
            add((room, name), f'has no source. Say where it is from: [sources] {name} = "..."')
    facts = sorted({name for _, name in given} | {"facts"})
    for name in file.sources:
        if name not in facts:
            near = nearest(name, facts)
            add(("sources", name), f"is the source of no fact here. Nearest: {near}")


_OWN_FAULTS = {
    "missing": "is missing. Every program needs a title.",
    "too_short": "is empty. Leave it out if the program has every choice.",
}


def _explain(path: TomlPath, fault: dict[str, Any]) -> str:
    tables: dict[str, type[BaseModel]] = {"runs": _Runs, "stack": _Stack}
    return explain_file_fault(path, fault, file=_Program, tables=tables, own=_OWN_FAULTS)


def _build(name: str, file: _Program, base: ProgramSpec | None) -> ProgramSpec:
    """The program of a file, with what its base says where it says nothing."""
    runs, like = file.runs, base or _NOTHING
    said = {key: getattr(file.stack, key) for key in file.stack.model_fields_set}
    return ProgramSpec(
        name=name,
        title=file.title,
        stack=dataclasses.replace(like.stack, **said),
        orders=_given(runs.order, like.orders),
        schedules=_given(runs.schedules, like.schedules),
        recompute=_given(runs.recompute, like.recompute),
        modules=_given(runs.modules, like.modules),
        context=_given(runs.context, like.context),
        precision=_given(runs.precision, like.precision),
        zero=_given(runs.zero, like.zero),
        sharding=runs.sharding or like.sharding,
        sources=tuple((dict(like.sources) | file.sources).items()),
    )


_NOTHING = ProgramSpec("", "", Stack(), None, None, None, None, None, None, None, "mixed", ())
"""A program with every choice that does what the defaults say."""


def _given(here: Sequence[Any] | None, there: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return there if here is None else tuple(here)
