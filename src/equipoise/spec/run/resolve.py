"""Resolve checked values to a run: fill in what was not given, and check keys against each other.

Why
    A key may be valid alone and wrong beside another. Those faults are detected here, on values
    that ``spec.run.load`` has checked one by one, so that one message lists both kinds.

What it decides
    Where each value comes from, and which model the sizes describe.

Kept true (tests/unit/spec/run/test_resolve.py, tests/unit/spec/run/test_load.py)
    One mistake, one message.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.base.digest import digest
from equipoise.base.nearest import nearest
from equipoise.spec.catalog import LOSSY, SCHEDULES
from equipoise.spec.limits import MOST_WINDOWS
from equipoise.spec.modality.judge import judge_modality
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.keys import DEFAULT, Fault, Given, Origin, build, keys, toml
from equipoise.spec.run.layout import idle_parts
from equipoise.spec.run.lora import FEED_FORWARD, TARGETS, LoraSpec
from equipoise.spec.run.precision import judge_precision
from equipoise.spec.run.resolve_model import judge_experts, resolve_model
from equipoise.spec.run.spec import PYTHON_SOURCES, CheckpointSpec, RunSpec
from equipoise.spec.run.wish import Wish, nearest_multiples


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run.toml with every default filled in."""

    spec: RunSpec
    model: ModelSpec
    origins: dict[str, str]
    """Source of each dotted key: ``default``, ``run.toml:12``, ``--train.steps``, ``preset 7m``."""
    base: Path
    """The folder that relative paths refer to."""
    digest: str
    """``digest_of`` them, wherever their values came from."""
    notes: tuple[str, ...] = ()
    """Notes for the author of the run: a line for each key under its old name."""


def digest_of(spec: RunSpec, model: ModelSpec) -> str:
    """Digest of all that decides what a run computes and how fast.

    Without ``fault`` and encoders that a run does not have: older digests stay what they were.
    """
    tables = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)}
    idle = {"fault", *(name for name in ("vision", "audio") if not tables[name].layers)}
    read = {name: table for name, table in tables.items() if name not in idle}
    return digest({"spec": read, "model": model})


def resolve(
    given: Mapping[str, Given], faulty: Iterable[str], base: Path
) -> tuple[ResolvedRun, list[Fault]]:
    """Fill in what was not given, and check keys against each other.

    Args:
        given: Checked values by dotted key, without faulty ones.
        faulty: Keys that were given but are wrong. They take their defaults here, and rules that
            read them are silent: one mistake, one message.
        base: The folder that relative paths refer to.

    Returns:
        The run, valid only if there are no faults; and the faults.
    """
    wish = Wish(
        {name: given.get(name, Given(key.default, DEFAULT)) for name, key in keys().items()},
        frozenset(faulty),
        [],
    )
    _judge_together(wish)
    model, model_origins = resolve_model(wish, base)
    _judge_experts_of_lora(wish, model)
    judge_experts(wish, model)
    judge_precision(wish, model)
    judge_modality(wish)
    spec = build({name: each.value for name, each in wish.given.items()})
    if not wish.faults and not wish.faulty:
        # A policy lets as many ranks share experts as can, once their number is known.
        is_open = spec.experts.policy != "fixed" and not wish.is_given("layout.ep")
        idle = idle_parts(spec.layout, spec.experts.policy)
        if idle is not None and not (is_open and model.experts):
            wish.tell("layout.parts", f"{toml(spec.layout.parts)} {idle}")
    run = ResolvedRun(
        spec=spec,
        model=model,
        origins={name: each.origin.label for name, each in wish.given.items()} | model_origins,
        base=base,
        digest=digest_of(spec, model),
    )
    return run, wish.faults


_LEAST_EVAL_TOKENS = 2
"""A document of one token has nothing to predict."""


def _judge_together(wish: Wish) -> None:
    if wish.is_sound("data.source", "data.path", "data.mix") and wish["data.mix"]:
        _judge_mix(wish)
    elif wish.is_sound("data.source", "data.path", "data.mix"):
        source, path = wish["data.source"], wish["data.path"]
        if source in PYTHON_SOURCES and path:
            wish.tell(
                "data.path",
                f"{toml(path)} is given, but data.source = {toml(source)} "
                f"({wish.given['data.source'].origin.label}) reads no path. "
                "Remove it, or set data.source.",
            )
        if source not in PYTHON_SOURCES and not path:
            wish.tell(
                "data.source",
                f"{toml(source)} reads data.path, which is empty. "
                "Set data.path to a file or a folder.",
            )
    _judge_conversations(wish)
    _judge_evaluation(wish)
    _judge_saves(wish)
    _judge_lora(wish)
    if wish.is_sound("pack.step_tokens", "pack.context_tokens"):
        step, window = wish["pack.step_tokens"], wish["pack.context_tokens"]
        if step // window > MOST_WINDOWS:
            wish.tell(
                "pack.step_tokens",
                f"{step:,} is {step // window:,} windows of {wish.cite('pack.context_tokens')}; "
                f"give at most {MOST_WINDOWS:,} windows.",
            )
        elif step % window:
            around = nearest_multiples(step, window)
            if wish.is_given("pack.step_tokens"):
                wish.tell(
                    "pack.step_tokens",
                    f"{step} is not a multiple of {wish.cite('pack.context_tokens')}. "
                    f"Nearest: {around}.",
                )
            else:
                wish.tell(
                    "pack.context_tokens",
                    f"{wish.cite('pack.step_tokens')} is not a multiple of {window}. "
                    f"Set pack.step_tokens to {around}.",
                )
    if wish.is_sound("pack.max_tokens", "pack.context_tokens"):
        most, window = wish["pack.max_tokens"], wish["pack.context_tokens"]
        if most is not None and most < window:
            wish.tell(
                "pack.max_tokens",
                f"{most} is fewer than {wish.cite('pack.context_tokens')}: "
                f"a whole window must fit. Give at least {window}.",
            )
    _judge_rate(wish)
    if wish.is_sound("layout.dp") and wish["layout.dp"] != "cores" and wish["layout.dp"] < 1:
        wish.tell("layout.dp", f"{wish['layout.dp']} is too small; it must be at least 1.")
    if wish.is_sound("layout.cp", "layout.ranks_per_node"):
        context, per_node = wish["layout.cp"], wish["layout.ranks_per_node"]
        if per_node is not None and context % per_node:
            divisors = [count for count in range(1, context + 1) if context % count == 0]
            closest = min(divisors, key=lambda count: abs(count - per_node))
            wish.tell(
                "layout.ranks_per_node",
                f"{per_node} does not divide {wish.cite('layout.cp')}. Nearest: {closest}.",
            )
    _judge_pipeline(wish)


_WITHOUT_COLUMNS = (*PYTHON_SOURCES, "text")
"""Sources whose documents are files, without columns."""


def _judge_conversations(wish: Wish) -> None:
    """Refuse a format that the source cannot have, and keys of conversations where are none."""
    if not wish.is_sound("data.source", "data.format", "data.loss", "data.mix"):
        return
    kind, rows = wish["data.format"], wish["data.mix"]
    kinds = [row.format or kind for row in rows] or [kind]
    if wish["data.loss"] == "last-answer" and set(kinds) == {"text"}:
        wish.tell(
            "data.loss",
            f"{toml(wish['data.loss'])} needs conversations, but {wish.cite('data.format')}. Set "
            'data.format = "messages" or "prompt-completion", or remove data.loss.',
        )
    if kind != "text" and not rows and wish["data.source"] in _WITHOUT_COLUMNS:
        wish.tell(
            "data.format",
            f"{toml(kind)} needs rows with columns, but {wish.cite('data.source')}. Set "
            'data.source = "jsonl", "parquet" or "datasets".',
        )
    for number, (row, each) in enumerate(zip(rows, kinds, strict=False), start=1):
        source = row.source or wish["data.source"]
        if each != "text" and source in _WITHOUT_COLUMNS:
            wish.tell(
                "data.mix",
                f"source {number}: format = {toml(each)} needs rows with columns, but its source "
                f'is {toml(source)}. Set its source to "jsonl", "parquet" or "datasets", or its '
                'format to "text".',
            )
        if each == "text" and row.loss == "last-answer":
            wish.tell(
                "data.mix",
                f"source {number}: loss = {toml(row.loss)} needs conversations, but its format is "
                '"text". Set its format to "messages" or "prompt-completion", or remove its loss.',
            )
    is_from_folder = wish["data.tokenizer"] != "train" or wish["model.init"] != "random"
    if "messages" in kinds and not is_from_folder:
        wish.tell(
            "data.mix" if rows else "data.format",
            '"messages" needs the chat template of a model\'s folder. Set data.tokenizer to that '
            'folder, or model.init = "hf:DIR".',
        )


def _judge_mix(wish: Wish) -> None:
    """Refuse a mixture beside a path, and sources that lack one or have one too many."""
    if wish["data.path"]:
        wish.tell(
            "data.path",
            f"{toml(wish['data.path'])} is given, but so are {len(wish['data.mix'])} sources in "
            "data.mix. Put it into a [[data.mix]] table of its own, or remove data.mix.",
        )
        return
    for number, row in enumerate(wish["data.mix"], start=1):
        source = row.source or wish["data.source"]
        if source in PYTHON_SOURCES and row.path:
            wish.tell(
                "data.mix",
                f"source {number}: path = {toml(row.path)} is given, but its source "
                f"{toml(source)} reads no path. Set its source.",
            )
        if source not in PYTHON_SOURCES and not row.path:
            wish.tell(
                "data.mix",
                f"source {number}: {toml(source)} reads a path, which is missing. Set its path.",
            )


def _judge_rate(wish: Wish) -> None:
    """Fit the default warm-up to the steps, and refuse phases that do not fit into them."""
    if not wish.is_sound("train.steps", "train.warmup_steps"):
        return
    steps, warmup = wish["train.steps"], wish["train.warmup_steps"]
    if warmup > steps and not wish.is_given("train.warmup_steps"):
        warmup = steps // 2
        half = Origin("half of train.steps", DEFAULT.order)
        wish.given["train.warmup_steps"] = Given(warmup, half)
    elif warmup > steps:
        wish.tell(
            "train.warmup_steps",
            f"{warmup} is more than {wish.cite('train.steps')}. Give at most {steps}.",
        )
        return
    decay, schedule = wish["train.decay_steps"], wish["train.schedule"]
    if decay is None or schedule != "wsd":
        return
    if wish.is_sound("train.decay_steps", "train.schedule") and warmup + decay > steps:
        wish.tell(
            "train.decay_steps",
            f"{decay} and {wish.cite('train.warmup_steps')} are more than "
            f"{wish.cite('train.steps')}. Give at most {steps - warmup}.",
        )


def _judge_evaluation(wish: Wish) -> None:
    """Refuse keys of an evaluation that does not take place, and a source without a path."""
    tokens = wish["eval.tokens"]
    if tokens != "all" and tokens < _LEAST_EVAL_TOKENS:
        wish.tell("eval.tokens", f"{tokens} is too small; it must be at least 2.")
        return
    if not wish.is_sound("eval.path"):
        return
    usual: dict[str, tuple[Any, ...]] = {
        "source": ("by-path",),
        "field": ("",),
        "every_steps": (None, wish["checkpoint.every_steps"]),
        "tokens": ("all",),
    }
    for key, values in usual.items() if not wish["eval.path"] else ():
        if wish.is_sound(name := f"eval.{key}") and wish[name] not in values:
            wish.tell(
                name,
                f"{toml(wish[name])} is given, but eval.path names no documents. Set eval.path to "
                f"a file or a folder that is not trained on, or remove {name}.",
            )
    if wish["eval.path"] and wish["eval.source"] in ("python-stdlib", "python-functions"):
        wish.tell(
            "eval.source",
            f'"{wish["eval.source"]}" reads no path, but {wish.cite("eval.path")} is given. Set '
            f'eval.source to "text", "jsonl", "parquet" or "datasets", or remove it.',
        )
    if wish["eval.source"] == "text" and wish["data.format"] != "text":
        wish.tell(
            "eval.source",
            f'"text" has no rows with columns, but {wish.cite("data.format")}. Set eval.source to '
            f'"jsonl", "parquet" or "datasets", or remove it.',
        )


def _judge_saves(wish: Wish) -> None:
    """Refuse a number of steps that cannot be, and what only "auto" reads."""
    if not wish.is_sound("checkpoint.every_steps", "checkpoint.rank_mtbf_hours"):
        return
    every, hours = wish["checkpoint.every_steps"], wish["checkpoint.rank_mtbf_hours"]
    if every != "auto" and every < 1:
        wish.tell("checkpoint.every_steps", f"{every} is too small; it must be at least 1.")
    elif every != "auto" and hours != CheckpointSpec().rank_mtbf_hours:
        wish.tell(
            "checkpoint.rank_mtbf_hours",
            f"{hours:g} is given, but {wish.cite('checkpoint.every_steps')} does not follow from "
            f'it. Set checkpoint.every_steps = "auto", or remove it.',
        )


def _judge_lora(wish: Wish) -> None:
    """Refuse adapters beside weights that nobody trained, and layers that cannot have one."""
    if not wish.is_sound("lora.rank", "lora.targets", "model.init", "train.freeze"):
        return
    names = [*TARGETS, *TARGETS.values()]
    is_theirs = wish["model.engine"] == "transformers"  # whose layers have names of their own
    for target in () if is_theirs else wish["lora.targets"]:
        if target not in names:
            wish.tell(
                "lora.targets",
                f"{toml(target)} is not one of {', '.join(map(toml, TARGETS))}. Nearest: "
                f"{toml(nearest(target, names))}.",
            )
            return
    if not wish["lora.rank"]:
        return
    if wish["model.init"] == "random":
        wish.tell(
            "lora.rank",
            f"{wish['lora.rank']} trains adapters beside weights that stay as they are, but "
            f"{wish.cite('model.init')}. Set model.init to a Hugging Face folder, or remove "
            f"lora.rank.",
        )
    if wish["train.freeze"]:
        wish.tell(
            "train.freeze",
            f"{toml(wish['train.freeze'])} is given, but {wish.cite('lora.rank')} leaves every "
            f"weight of the model as it is. Remove one of them.",
        )


def _judge_experts_of_lora(wish: Wish, model: ModelSpec) -> None:
    """Refuse adapters of feed-forwards where layers have experts instead."""
    if not wish["lora.rank"] or not model.experts or not wish.is_sound("lora.targets"):
        return
    if wish["model.engine"] == "transformers":
        return  # there, experts are not linear layers, and no target matches them
    layers = LoraSpec(targets=wish["lora.targets"]).layers
    if wish["lora.targets"] and any(each in FEED_FORWARD for each in layers):
        wish.tell(
            "lora.targets",
            f"{toml(wish['lora.targets'])} has layers of feed-forwards, but the model's layers "
            f"have {model.experts} experts, which adapters cannot join. Set lora.targets = "
            f'["query", "key", "value", "output"].',
        )


def _judge_pipeline(wish: Wish) -> None:
    """Refuse keys of a pipeline that would have no effect, or another than they say."""
    if not wish.is_sound("layout.pp", "layout.schedule", "layout.skip", "layout.virtual"):
        return
    skips = SCHEDULES[wish["layout.schedule"]].is_lossy
    for name, idle in (("layout.skip", 0), ("layout.virtual", None)):
        if wish["layout.pp"] == 1 and wish[name] not in (idle, 1):
            wish.tell(
                name,
                f"{wish[name]:g} needs a pipeline, but {wish.cite('layout.pp')}. "
                f"Set layout.pp to 2 or more.",
            )
            return
    if wish["layout.skip"] and not skips:
        wish.tell(
            "layout.skip",
            f"{wish['layout.skip']:g} leaves out stages, but {wish.cite('layout.schedule')} runs "
            f"all of them. Set layout.schedule to {' or '.join(map(toml, LOSSY))}, "
            f"which train another model, or layout.skip to 0.",
        )
    if skips and not wish["layout.skip"] and wish["layout.pp"] > 1:
        wish.tell(
            "layout.schedule",
            f"{toml(wish['layout.schedule'])} leaves out stages and so trains another model, but "
            f"{wish.cite('layout.skip')} leaves out none. Set layout.skip to the share of "
            f"stages that each micro-batch leaves out.",
        )
