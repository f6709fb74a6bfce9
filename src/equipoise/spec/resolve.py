"""From judged values to a resolved run: rules between keys, the model's sizes, ways to show it.

Why
    A key may be right alone and wrong beside another. Those faults are found here, on values
    that ``spec.load`` has already judged one by one, so that one message lists both kinds.

What it decides
    Where each value comes from, which model the sizes describe, and how a run is written down:
    as plain data, as TOML with origins, as a commented template, as a JSON Schema.

Kept true (tests/unit/spec/test_resolve.py, tests/unit/spec/test_load.py)
    What ``render`` writes loads back to the same digest; the template loads to the defaults,
    and so it does with every line of it switched on.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from equipoise.base.digest import digest
from equipoise.base.errors import ModelError
from equipoise.base.nearest import nearest
from equipoise.base.units import format_count
from equipoise.spec.hf_config import model_from_hf_config
from equipoise.spec.model import PRESETS, ModelSpec
from equipoise.spec.run import ModelSection, RunSpec

EXTENDS = "extends"
EXTENDS_DESCRIPTION = "another run.toml whose values stand where this file has none; one level"
_HF = "hf:"
# The keys of [model] that are sizes, named as in ModelSpec.
SIZES = tuple(
    field.name
    for field in dataclasses.fields(ModelSection)
    if field.name in {other.name for other in dataclasses.fields(ModelSpec)}
)
# Those that say something of experts, with their values for a model without.
_OF_EXPERTS = {
    field.name: field.default
    for field in dataclasses.fields(ModelSpec)
    if field.name in SIZES[SIZES.index("experts") + 1 :]
}
# Those that config.json of a published model says nothing of.
_TRAINING = ("balance", "balance_rate", "capacity_factor")


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
    """Where a value comes from, and its place in the order in which faults are told."""

    label: str
    order: tuple[int, int]

    @property
    def is_flag(self) -> bool:
        """Whether a flag of the command line gave the value."""
        return self.label.startswith("--")


DEFAULT = Origin("default", (9, 0))


@dataclass(frozen=True, slots=True)
class Given:
    """A value and where it was given."""

    value: Any
    origin: Origin


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, at one place."""

    origin: Origin
    key: str
    message: str

    def __str__(self) -> str:
        if self.origin.is_flag:
            return f"{self.origin.label}: {self.message}"
        return f"{self.origin.label}  {self.key}: {self.message}"


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run.toml with every default filled in."""

    spec: RunSpec
    model: ModelSpec
    origins: dict[str, str]
    """Of every dotted key: ``default``, ``run.toml:12``, ``--train.steps``, ``preset 7m``."""
    base: Path
    """The folder that relative paths refer to."""
    digest: str
    """The name of ``spec`` and ``model`` together, wherever their values came from."""


@functools.cache
def keys() -> dict[str, Key]:
    """Every key of run.toml by its dotted name, in the order of RunSpec.

    >>> keys()["train.steps"].default, keys()["name"].section
    (100, '')
    """
    found: dict[str, Key] = {}
    for section, kind in _sections().items():
        hints = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            if get_origin(hints[field.name]) is not Annotated:
                continue
            name = f"{section}.{field.name}" if section else field.name
            info = next(x for x in get_args(hints[field.name])[1:] if isinstance(x, FieldInfo))
            found[name] = Key(
                name=name,
                section=section,
                field=field.name,
                annotation=hints[field.name],
                default=field.default,
                description=info.description or "",
            )
    return found


@functools.cache
def _sections() -> dict[str, Any]:
    """The dataclass of each table; the file itself is the table without a name."""
    tables = {field.name: field.type for field in dataclasses.fields(RunSpec)}
    return {"": RunSpec} | {
        name: kind for name, kind in tables.items() if dataclasses.is_dataclass(kind)
    }


def section_names() -> list[str]:
    """The tables of run.toml, in order."""
    return [name for name in _sections() if name]


def to_dict(spec: RunSpec) -> dict[str, Any]:
    """The run as plain data: a dict of each table."""
    return dataclasses.asdict(spec)


def build(values: Mapping[str, Any]) -> RunSpec:
    """The RunSpec of a value for every dotted key."""
    tables: dict[str, dict[str, Any]] = {name: {} for name in _sections()}
    for name, key in keys().items():
        tables[key.section][key.field] = values[name]
    return RunSpec(
        **tables[""], **{name: _sections()[name](**tables[name]) for name in section_names()}
    )


def resolve(
    given: Mapping[str, Given], faulty: Iterable[str], base: Path
) -> tuple[ResolvedRun, list[Fault]]:
    """Fill in what was not given, and judge keys against each other.

    Args:
        given: Judged values by dotted key; those of faulty keys are left out.
        faulty: Keys that were given and are wrong. They take their defaults here, and rules
            that read them are silent: one mistake, one message.
        base: The folder that relative paths refer to.

    Returns:
        The run, to be used only if there are no faults; and the faults.
    """
    wish = _Wish(
        {name: given.get(name, Given(key.default, DEFAULT)) for name, key in keys().items()},
        frozenset(faulty),
        [],
    )
    _judge_together(wish)
    model, model_origins = _resolve_model(wish, base)
    spec = build({name: each.value for name, each in wish.given.items()})
    run = ResolvedRun(
        spec=spec,
        model=model,
        origins={name: each.origin.label for name, each in wish.given.items()} | model_origins,
        base=base,
        digest=digest({"spec": spec, "model": model}),
    )
    return run, wish.faults


@dataclass(frozen=True, slots=True)
class _Wish:
    """The value of every key, and the faults found between them so far."""

    given: dict[str, Given]
    faulty: frozenset[str]
    faults: list[Fault]

    def __getitem__(self, name: str) -> Any:
        return self.given[name].value

    def is_given(self, name: str) -> bool:
        return self.given[name].origin is not DEFAULT

    def is_sound(self, *names: str) -> bool:
        return self.faulty.isdisjoint(names)

    def tell(self, name: str, message: str) -> None:
        self.faults.append(Fault(self.given[name].origin, name, message))

    def cite(self, name: str) -> str:
        each = self.given[name]
        return f"{name}, {toml(each.value)} ({each.origin.label})"


def _judge_together(wish: _Wish) -> None:
    if wish.is_sound("data.source", "data.path"):
        source, path = wish["data.source"], wish["data.path"]
        if source == "python-stdlib" and path:
            wish.tell(
                "data.path",
                f"{toml(path)} is given, but data.source = {toml(source)} "
                f"({wish.given['data.source'].origin.label}) reads no path. "
                "Remove it, or set data.source.",
            )
        if source != "python-stdlib" and not path:
            wish.tell(
                "data.source",
                f"{toml(source)} reads data.path, which is empty. "
                "Set data.path to a file or a folder.",
            )
    if wish.is_sound("pack.step_tokens", "pack.context_tokens"):
        step, window = wish["pack.step_tokens"], wish["pack.context_tokens"]
        if step % window:
            around = _around(step, window)
            if wish.is_given("pack.step_tokens"):
                wish.tell(
                    "pack.step_tokens",
                    f"{step} is not a multiple of {wish.cite('pack.context_tokens')}. "
                    f"Nearest: {around}.",
                )
            else:
                wish.tell(
                    "pack.context_tokens",
                    f"{wish.cite('pack.step_tokens')}, is not a multiple of {window}. "
                    f"Set pack.step_tokens to {around}.",
                )
    if wish.is_sound("pack.max_tokens", "pack.context_tokens"):
        most, window = wish["pack.max_tokens"], wish["pack.context_tokens"]
        if most is not None and most < window:
            wish.tell(
                "pack.max_tokens",
                f"{most} is fewer than {wish.cite('pack.context_tokens')}: "
                f"a whole window must fit. The least is {window}.",
            )
    if wish.is_sound("train.steps", "train.warmup_steps"):
        steps, warmup = wish["train.steps"], wish["train.warmup_steps"]
        if warmup > steps and wish.is_given("train.warmup_steps"):
            wish.tell(
                "train.warmup_steps",
                f"{warmup} is more than {wish.cite('train.steps')}. The most is {steps}.",
            )
        elif warmup > steps:
            wish.tell(
                "train.steps",
                f"{steps} is fewer than {wish.cite('train.warmup_steps')}. "
                f"Set train.warmup_steps to {steps} or less.",
            )
    if wish.is_sound("layout.dp") and wish["layout.dp"] != "cores" and wish["layout.dp"] < 1:
        wish.tell("layout.dp", f"{wish['layout.dp']} is too small; the least is 1.")
    if wish.is_sound("layout.context", "layout.ranks_per_node"):
        context, per_node = wish["layout.context"], wish["layout.ranks_per_node"]
        if per_node is not None and context % per_node:
            divisors = [count for count in range(1, context + 1) if context % count == 0]
            closest = min(divisors, key=lambda count: abs(count - per_node))
            wish.tell(
                "layout.ranks_per_node",
                f"{per_node} does not divide {wish.cite('layout.context')}. Nearest: {closest}.",
            )


def _around(value: int, step: int) -> str:
    below = value // step * step
    return f"{below} or {below + step}" if below else f"{below + step}"


def _resolve_model(wish: _Wish, base: Path) -> tuple[ModelSpec, dict[str, str]]:
    init = wish["model.init"]
    if init.removeprefix(_HF) not in ("", init):
        return _resolve_hf(wish, base, init.removeprefix(_HF))
    if init != "random":
        wish.tell("model.init", f'{toml(init)} is not one of "random", "hf:DIR".')
    name = wish["model.preset"]
    if name not in PRESETS:
        wish.tell(
            "model.preset",
            f"{toml(name)} is not a preset. Nearest: {toml(nearest(name, PRESETS))}. "
            f"All: {', '.join(PRESETS)}.",
        )
        return PRESETS[keys()["model.preset"].default], {}
    start = PRESETS[name]
    origins = {f"model.{size}": f"preset {name}" for size in SIZES if not _is_set(wish, size)}
    model = dataclasses.replace(
        start, **{size: wish[f"model.{size}"] for size in SIZES if _is_set(wish, size)}
    )
    if wish.is_sound("model.preset", *(f"model.{size}" for size in SIZES)):
        is_reshaped = (model.hidden, model.heads) != (start.hidden, start.heads)
        if is_reshaped and not _is_set(wish, "head_width"):
            _judge_width(wish, model, origins)
            model = dataclasses.replace(model, head_width=max(1, model.hidden // model.heads))
            origins["model.head_width"] = "model.hidden // model.heads"
        elif model.head_width % 2:
            wish.tell(
                "model.head_width",
                f"{model.head_width} is odd; rotary angles turn pairs. "
                f"Nearest: {_around(model.head_width, 2)}.",
            )
        _judge_heads(wish, model, origins)
        model = _fill_experts(wish, model, origins)
    if wish["data.tokenizer"] == "train":
        if not _is_set(wish, "vocab"):
            model = dataclasses.replace(model, vocab=wish["data.vocab"])
            origins["model.vocab"] = "data.vocab"
        elif model.vocab < wish["data.vocab"] and wish.is_sound("model.vocab", "data.vocab"):
            wish.tell(
                "model.vocab",
                f"{model.vocab} is fewer than {wish.cite('data.vocab')}, the size of the "
                f"tokenizer that is trained. The least is {wish['data.vocab']}.",
            )
    return model, origins


def _is_set(wish: _Wish, size: str) -> bool:
    return wish[f"model.{size}"] is not None


def _cite_size(model: ModelSpec, origins: Mapping[str, str], wish: _Wish, size: str) -> str:
    origin = origins.get(f"model.{size}", wish.given[f"model.{size}"].origin.label)
    return f"model.{size}, {getattr(model, size)} ({origin})"


def _judge_width(wish: _Wish, model: ModelSpec, origins: Mapping[str, str]) -> None:
    pair = 2 * model.heads
    if model.hidden % pair == 0:
        return
    around = _around(model.hidden, pair)
    if wish.is_given("model.hidden"):
        wish.tell(
            "model.hidden",
            f"{model.hidden} does not divide into heads of an even width by "
            f"{_cite_size(model, origins, wish, 'heads')}. "
            f"Nearest: {around}; or give model.head_width.",
        )
    else:
        wish.tell(
            "model.heads",
            f"{_cite_size(model, origins, wish, 'hidden')}, does not divide into {model.heads} "
            f"heads of an even width. Set model.hidden to {around}, or give model.head_width.",
        )


def _judge_heads(wish: _Wish, model: ModelSpec, origins: Mapping[str, str]) -> None:
    if model.heads % model.kv_heads == 0:
        return
    divisors = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
    closest = min(divisors, key=lambda n: abs(n - model.kv_heads))
    if wish.is_given("model.kv_heads"):
        wish.tell(
            "model.kv_heads",
            f"{model.kv_heads} does not divide {_cite_size(model, origins, wish, 'heads')}. "
            f"Nearest: {closest}.",
        )
    else:
        wish.tell(
            "model.heads",
            f"{model.heads} is not a multiple of "
            f"{_cite_size(model, origins, wish, 'kv_heads')}. Set model.kv_heads to {closest}.",
        )


def _fill_experts(wish: _Wish, model: ModelSpec, origins: dict[str, str]) -> ModelSpec:
    """The sizes of experts that were not given, and what does not go together."""
    if not model.experts:
        for size, without in _OF_EXPERTS.items():
            if _is_set(wish, size) and getattr(model, size) != without:
                wish.tell(
                    f"model.{size}",
                    f"{toml(getattr(model, size))} says something of experts, and there are "
                    f"none: {_cite_size(model, origins, wish, 'experts')}. Set model.experts.",
                )
        return model
    if not model.top_k:
        model = dataclasses.replace(model, top_k=min(2, model.experts))
        origins["model.top_k"] = "2, or model.experts"
    if not model.expert_ffn:
        model = dataclasses.replace(model, expert_ffn=max(1, model.ffn // model.top_k))
        origins["model.expert_ffn"] = "model.ffn // model.top_k"
    if model.top_k > model.experts:
        at = "top_k" if wish.is_given("model.top_k") else "experts"
        wish.tell(
            f"model.{at}",
            f"a token cannot pass through {model.top_k} of {model.experts} experts. Set "
            f"model.top_k to {model.experts} or less.",
        )
    if not model.sparse_layers:
        at = "dense_layers" if wish.is_given("model.dense_layers") else "expert_every"
        wish.tell(
            f"model.{at if wish.is_given(f'model.{at}') else 'experts'}",
            f"none of {model.layers} layers has experts: not the first {model.dense_layers}, and "
            f"of the others those whose number is a multiple of {model.expert_every}. Lower "
            "model.dense_layers or model.expert_every.",
        )
    return model


def _resolve_hf(wish: _Wish, base: Path, folder: str) -> tuple[ModelSpec, dict[str, str]]:
    for name in ("preset", *(size for size in SIZES if size not in _TRAINING)):
        if wish.is_given(f"model.{name}"):
            wish.tell(
                f"model.{name}",
                f"given beside model.init = {toml(wish['model.init'])} "
                f"({wish.given['model.init'].origin.label}), whose config.json holds the sizes. "
                "Remove one of them.",
            )
    fallback = PRESETS[keys()["model.preset"].default]
    try:
        text = (base / Path(folder).expanduser() / "config.json").read_text(encoding="utf-8")
        config = json.loads(text)
        if not isinstance(config, dict):
            raise ValueError("it holds no table")
        model = model_from_hf_config(config)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        wish.tell(
            "model.init",
            f"cannot read {folder}/config.json: {reason}. "
            "Name a folder that holds config.json and *.safetensors.",
        )
        return fallback, {}
    except ValueError as error:
        wish.tell("model.init", f"{folder}/config.json is not JSON: {error}.")
        return fallback, {}
    except ModelError as error:
        wish.tell("model.init", f"{folder}/{error}")
        return fallback, {}
    if (
        wish["data.tokenizer"] == "train"
        and wish.is_sound("data.tokenizer", "data.vocab")
        and wish["data.vocab"] > model.vocab
    ):
        wish.tell(
            "model.init",
            f"its vocabulary of {model.vocab} is smaller than {wish.cite('data.vocab')}, the "
            "size of the tokenizer that is trained. Set data.tokenizer to the folder's "
            f"tokenizer.json, or data.vocab to {model.vocab} or less.",
        )
    trained = {size: wish[f"model.{size}"] for size in _TRAINING if _is_set(wish, size)}
    model = dataclasses.replace(model, **trained)
    return model, {
        f"model.{size}": f"{folder}/config.json" for size in SIZES if size not in trained
    }


def toml(value: Any) -> str:
    """A scalar as TOML writes it.

    >>> toml(True), toml(3e-3), toml("a")
    ('true', '0.003', '"a"')
    """
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def _effective(run: ResolvedRun, key: Key) -> Any:
    """The value that stands in for a key that was not given and has no default."""
    if key.section == "model":
        return getattr(run.model, key.field)
    if key.section == "layout":
        layout = run.spec.layout
        return layout.stages // layout.pipeline if key.field == "virtual" else layout.context
    return int(1.25 * run.spec.pack.context_tokens)  # the rule that pack.max_tokens describes


def _value(run: ResolvedRun, key: Key) -> Any:
    owner = getattr(run.spec, key.section) if key.section else run.spec
    return getattr(owner, key.field)


def render(run: ResolvedRun) -> str:
    """The run as TOML that loads back to the same digest, each line with its origin.

    Values that follow from others (a preset's sizes) are shown switched off, as comments.
    """
    rows: list[tuple[str, str]] = []
    section = ""
    for name, key in keys().items():
        if key.section != section:
            section = key.section
            rows += [("", ""), (f"[{section}]", "")]
        value = _value(run, key)
        is_unused = name == "model.preset" and run.spec.model.init != "random"
        mark = "#" if value is None or is_unused else ""
        shown = _effective(run, key) if value is None else value
        origin = "not used" if is_unused else run.origins[name]
        rows.append((f"{mark}{key.field} = {toml(shown)}", origin))
    head = f"# {format_count(run.model.params)} parameters; digest {run.digest}\n"
    return head + _align(rows)


def template(run: ResolvedRun) -> str:
    """A run.toml to start from: every key with its description, switched off unless given."""
    head = (
        "# A run of equipoise. A line that starts with # shows the default: delete the # to\n"
        '# change it. "equipoise config" shows what every key resolves to, and why.\n\n'
    )
    rows: list[tuple[str, str]] = [(f'# {EXTENDS} = "base.toml"', EXTENDS_DESCRIPTION)]
    section = ""
    for name, key in keys().items():
        if key.section != section:
            section = key.section
            summary = (_sections()[section].__doc__ or "").strip()
            rows += [("", ""), (f"[{section}]  # {summary}", "")]
        value = _value(run, key)
        shown = _effective(run, key) if value is None else value
        mark = "#" if run.origins[name] == DEFAULT.label or value is None else ""
        rows.append((f"{mark}{key.field} = {toml(shown)}", _describe(key)))
    return head + _align(rows)


def _describe(key: Key) -> str:
    options = [each for each in _flatten(key.annotation) if not isinstance(each, type)]
    if not options or all(str(each) in key.description for each in options):
        return key.description
    return f"{key.description}: {', '.join(toml(each) for each in options)}"


def _flatten(annotation: Any) -> list[Any]:
    """The types and the literal values that an annotation allows."""
    if get_origin(annotation) is Annotated:
        return _flatten(get_args(annotation)[0])
    if arguments := get_args(annotation):
        return [leaf for each in arguments for leaf in _flatten(each)]
    return [] if annotation is type(None) else [annotation]


def choices(key: Key) -> list[Any]:
    """The types and the literal values that a key allows, without ``None``.

    >>> choices(keys()["layout.dp"])
    [<class 'int'>, 'cores']
    """
    return _flatten(key.annotation)


def _align(rows: Iterable[tuple[str, str]], most: int = 44) -> str:
    rows = list(rows)
    width = max((len(text) for text, note in rows if note and len(text) <= most), default=0)
    lines = (f"{text:<{width}}  # {note}" if note else text for text, note in rows)
    return "\n".join(lines) + "\n"


def schema() -> dict[str, Any]:
    """The JSON Schema of run.toml, for editors."""
    raw = TypeAdapter(RunSpec).json_schema()
    found: dict[str, Any] = _mend(raw)
    found["properties"] = {
        EXTENDS: {"type": "string", "title": "Extends", "description": EXTENDS_DESCRIPTION},
        **found["properties"],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": "run.toml"}


def _mend(part: Any) -> Any:
    """Close every table, and take out null, which TOML does not have."""
    if isinstance(part, list):
        return [_mend(each) for each in part]
    if not isinstance(part, dict):
        return part
    mended = {
        name: _mend(each) for name, each in part.items() if not (name == "default" and each is None)
    }
    options = [each for each in mended.get("anyOf", ()) if each != {"type": "null"}]
    if options:
        mended.pop("anyOf")
        mended |= options[0] if len(options) == 1 else {"anyOf": options}
    if mended.get("type") == "object":
        mended["additionalProperties"] = False
    return mended
