"""Sizes in one line: a model and a layout as ``name=value`` words.

Why
    "How long does this take, and does it fit?" takes one line, before there is a file.

What it decides
    A model is a name in ``PLANNED``, a path to a Hugging Face ``config.json`` or its folder, or
    words; a layout is only words. Sizes that a model's words omit follow from the rest: as many
    key/value heads as heads, a feed-forward of four times the hidden width, or 8/3 of it with a
    gate, rounded up to a multiple of 256.

Kept true (tests/unit/spec/test_words.py)
    A preset written as words has the preset's weights; each faulty word is refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from equipoise.base.errors import LayoutError, ModelError, SpecError
from equipoise.base.nearest import nearest
from equipoise.base.read import read_json, reason
from equipoise.base.shown import shown
from equipoise.spec.cluster.spec import MOST_DEVICES
from equipoise.spec.layout import Layout
from equipoise.spec.limits import MOST_SIZE
from equipoise.spec.model.hf_config import MODEL_TYPES, model_from_hf_config
from equipoise.spec.model.other_config import FORECAST, forecast_config
from equipoise.spec.model.presets import PLANNED, ModelSpec
from equipoise.spec.model.priced import without_arithmetic

_MODEL_WORDS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_width",
    "ffn",
    "vocab",
    "gated",
    "tied",
    "experts",
    "top_k",
    "expert_ffn",
    "identity_experts",
    "expert_groups",
    "kept_groups",
    "shared_ffn",
    "shortcut",
    "dense_layers",
    "expert_every",
)
_NEEDED = ("layers", "hidden", "heads", "vocab")
_FROM_ZERO = (
    "gated",
    "tied",
    "experts",
    "top_k",
    "expert_ffn",
    "identity_experts",
    "expert_groups",
    "kept_groups",
    "shared_ffn",
    "shortcut",
    "dense_layers",
)
MOST = MOST_SIZE
"""The largest size or degree of a command line."""
_DIGITS = 40
"""Words longer than this are not read as numbers."""
_MOST_LAYERS = 1024
"""Splitting many more layers over many stages takes minutes."""
LAYOUT_WORDS = ("dp", "cp", "tp", "pp", "ep", "etp", "zero", "replicas", "virtual")


@dataclass(frozen=True, slots=True)
class LayoutWords:
    """The contents of ``--layout``."""

    layout: Layout
    virtual: int
    """Stages of each pipeline rank."""


def read_words(setting: str, text: str, known: tuple[str, ...]) -> dict[str, int]:
    """Whole numbers by name, from ``name=value,name=value``.

    Args:
        setting: What the words set; messages begin with it.
        text: The words.
        known: Legal names.

    Raises:
        SpecError: a word is not ``name=value``, is unknown or given twice, or its value is not a
            whole number.

    >>> read_words("layout", "tp=8,pp=16", ("tp", "pp"))
    {'tp': 8, 'pp': 16}
    """
    numbers: dict[str, int] = {}
    for word in text.split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        if name not in known:
            raise SpecError(
                f'{setting}: "{word}" begins with no known name. Nearest: {nearest(name, known)}. '
                f"Give {', '.join(known)} as name=number, with commas between."
            )
        if name in numbers:
            raise SpecError(f"{setting}: {name} is given twice. Give it once.")
        digits, least = value.replace("_", ""), 0 if name in (*_FROM_ZERO, "zero") else 1
        is_number = digits.isascii() and digits.isdecimal() and len(digits) <= _DIGITS
        if not is_number or not least <= int(digits) <= MOST:
            raise SpecError(
                f'{setting}: {name} is "{value}". Give a whole number of {least} to {MOST:,}, as '
                f"in {name}={1 if name in ('gated', 'tied', 'zero') else 8}."
            )
        if name == "zero" and int(digits) > 3:
            raise SpecError(f"{setting}: zero is {int(digits)}. Give 0, 1, 2 or 3.")
        numbers[name] = int(digits)
    return numbers


def read_layout(text: str) -> LayoutWords:
    """Degrees of parallelism; what is not given is 1, and ``zero`` is 1.

    Raises:
        SpecError: a word is wrong.
        LayoutError: the degrees do not match.

    >>> read_layout("tp=8,pp=16,dp=64,virtual=7").layout.world
    8192
    """
    words = read_words("layout", text, LAYOUT_WORDS)
    ranks = math.prod(words.get(axis, 1) for axis in ("dp", "cp", "tp", "pp"))
    if ranks > MOST_DEVICES:
        raise SpecError(
            f"layout: {ranks:,} ranks are too many. Give degrees whose product is "
            f"{MOST_DEVICES:,} or less."
        )
    layout = Layout(
        dp=words.get("dp", 1),
        cp=words.get("cp", 1),
        tp=words.get("tp", 1),
        pp=words.get("pp", 1),
        ep=words.get("ep", 1),
        etp=words.get("etp", 1),
        zero=cast(Literal[0, 1, 2, 3], words.get("zero", 1)),
        replicas=words.get("replicas", 1),
    )
    virtual = words.get("virtual", 1)
    if virtual > 1 and layout.pp == 1:
        raise LayoutError(
            f"layout: virtual = {virtual} needs a pipeline; pp = 1. Give pp of 2 or more, or "
            f"omit virtual."
        )
    return LayoutWords(layout, virtual)


def read_model(text: str) -> ModelSpec:
    """A model by name, by its config.json, or by its sizes.

    Raises:
        SpecError: no such preset, or a word is wrong or missing.
        ModelError: the config.json is not one, or of a model that this decoder cannot compute.

    >>> read_model("layers=2,hidden=64,heads=4,vocab=100,gated=0").ffn
    256
    """
    if text in PLANNED:
        return PLANNED[text]
    if "=" in text:
        return _require_layers(_model_of(read_words("model", text, _MODEL_WORDS)))
    file = Path(text) / "config.json" if text and Path(text).is_dir() else Path(text)
    if file.suffix != ".json":
        raise SpecError(
            f'model: "{text}" is neither a known model nor a config.json. Nearest: '
            f"{nearest(text, PLANNED)}. All: {', '.join(PLANNED)}. Any other is "
            f"layers=..,hidden=..,heads=..,vocab=.., or the path of its config.json."
        )
    try:
        config = read_json(file)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model: {file} cannot be read as a config.json ({reason(error)}). Give the "
            f"file that the model was published with."
        ) from None
    if not isinstance(config, dict):
        raise ModelError(
            f"model: {file} does not hold a table of sizes. Give the config.json that the model "
            f"was published with."
        )
    kind, known = config.get("model_type"), (*MODEL_TYPES, *FORECAST)
    if not isinstance(kind, str) or kind not in known:
        hint = f" Nearest: {nearest(kind, known)}." if isinstance(kind, str) else ""
        raise ModelError(
            f"{file.name}: model_type {shown(kind)} is not one of {', '.join(known)}.{hint}"
        )
    try:
        if _forecast_kind(config) is not None:
            model = forecast_config(config)
        else:
            model = model_from_hf_config(without_arithmetic(config)[0])
    except ModelError as error:
        raise ModelError(str(error).replace("config.json", file.name, 1)) from None
    return _require_layers(model)


def _config_of(text: str) -> tuple[str, object]:
    """Name and content of a model's config.json; None where it is not one."""
    file = Path(text) / "config.json" if text and Path(text).is_dir() else Path(text)
    if text in PLANNED or "=" in text or file.suffix != ".json":
        return file.name, None
    try:
        return file.name, read_json(file)
    except (OSError, ValueError):
        return file.name, None


def unread_of(text: str) -> tuple[str, ...]:
    """What a model's config.json says of its arithmetic that no price depends on, in words.

    Args:
        text: As ``read_model`` takes it; of what that refuses there is nothing to say.
    """
    _, config = _config_of(text)
    kind = _forecast_kind(config)
    if kind is not None:
        return (f"the rotary embedding of {kind}",)
    is_known = isinstance(config, dict) and config.get("model_type") in MODEL_TYPES
    return without_arithmetic(config)[1] if is_known and isinstance(config, dict) else ()


def forecast_note(text: str, context_tokens: int | None = None) -> str:
    """What a forecast of this model should be read with; empty where there is nothing to say.

    Args:
        text: As ``read_model`` takes it; of what that refuses there is nothing to say.
        context_tokens: Window that is forecast [tokens].
    """
    file_name, config = _config_of(text)
    kind, notes = _forecast_kind(config), list[str]()
    if kind is not None:
        notes.append(f"{kind} is forecast, and cannot be trained here: {FORECAST[kind]}.")
    elif unread := unread_of(text):
        said = " and ".join(unread)
        notes.append(f"{file_name} is forecast, and cannot be trained here with {said}.")
    most = _longest(config)
    if most is not None and context_tokens is not None and context_tokens > most:
        notes.append(
            f"{file_name}: max_position_embeddings is {most:,}, and a window has "
            f"{context_tokens:,} tokens. The price holds, but the model was not made for them."
        )
    return " ".join(notes)


def _longest(config: object) -> int | None:
    """Tokens for which a config.json's text decoder was made; None where it does not say."""
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    most = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    return most if type(most) is int and most > 0 else None


def _forecast_kind(config: object) -> str | None:
    """The model type of a config.json that is only forecast."""
    kind = config.get("model_type") if isinstance(config, dict) else None
    return kind if isinstance(kind, str) and kind in FORECAST else None


def _require_layers(model: ModelSpec) -> ModelSpec:
    """Refuse too many layers, and experts in no layer, before pricing layer by layer."""
    if model.layers > _MOST_LAYERS:
        raise SpecError(
            f"model: {model.layers:,} layers are too many. Give {_MOST_LAYERS:,} or fewer."
        )
    if model.experts and not model.sparse_layers:
        raise SpecError(
            f"model: none of {model.layers} layers has experts, with dense_layers = "
            f"{model.dense_layers} and expert_every = {model.expert_every}. Lower them, or leave "
            f"experts out."
        )
    return model


def _model_of(words: Mapping[str, int]) -> ModelSpec:
    missing = [name for name in _NEEDED if name not in words]
    if missing:
        raise SpecError(
            f"model: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. Give "
            f"at least {', '.join(_NEEDED)}."
        )
    for name in ("gated", "tied", "shortcut"):
        if words.get(name, 0) > 1:
            raise SpecError(f"model: {name} is {words[name]}. Give 0 for no or 1 for yes.")
    hidden, heads = words["hidden"], words["heads"]
    kv_heads = words.get("kv_heads", heads)
    if heads % kv_heads:
        raise SpecError(
            f"model: {heads} heads cannot share {kv_heads} key/value heads. Give a kv_heads that "
            f"divides heads."
        )
    if "head_width" not in words and hidden % heads:
        raise SpecError(
            f"model: a width of {hidden} does not divide over {heads} heads. Give head_width."
        )
    experts, top_k = words.get("experts", 0), words.get("top_k", 0)
    if (experts == 0) != (top_k == 0) or top_k > experts:
        raise SpecError(
            f"model: {experts} experts with top_k = {top_k}. Give both, top_k between 1 and "
            f"experts."
        )
    if words.get("shortcut") and not (experts and words.get("shared_ffn")):
        raise SpecError(
            "model: shortcut lets rows of experts travel beside a shared expert. Give experts and "
            "shared_ffn too."
        )
    groups, kept = words.get("expert_groups", 0), words.get("kept_groups", 0)
    if (groups == 0) != (kept == 0) or kept > groups or (groups and experts % groups):
        raise SpecError(
            f"model: {experts} experts in expert_groups = {groups} with kept_groups = {kept}. "
            f"Give both, kept_groups between 1 and expert_groups, which divides experts."
        )
    gated = bool(words.get("gated", 1))
    ffn = words.get("ffn") or (-(-8 * hidden // 768) * 256 if gated else 4 * hidden)
    return ModelSpec(
        layers=words["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=words["vocab"],
        head_width=words.get("head_width") or hidden // heads,
        tied=bool(words.get("tied", 0)),
        gated=gated,
        experts=experts,
        top_k=top_k,
        expert_ffn=words.get("expert_ffn") or (ffn if experts else 0),
        identity_experts=words.get("identity_experts", 0),
        expert_groups=groups,
        kept_groups=kept,
        shared_ffn=words.get("shared_ffn", 0),
        shortcut=bool(words.get("shortcut", 0)),
        dense_layers=words.get("dense_layers", 0),
        expert_every=words.get("expert_every", 1),
    )
