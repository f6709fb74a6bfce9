"""The model that a run's sizes describe: a preset, a Hugging Face folder, or sizes of its own.

Kept true (tests/unit/spec/run/test_load.py)
    Sizes that do not match are reported at the one that was given, with the nearest that do.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from equipoise.base.errors import ModelError
from equipoise.base.nearest import nearest
from equipoise.base.read import read_json, user_path
from equipoise.spec.model.hf_config import model_from_hf_config
from equipoise.spec.model.other_config import model_from_other_config
from equipoise.spec.model.presets import PRESETS, ModelSpec
from equipoise.spec.names import TOKENIZER_FILE
from equipoise.spec.run.keys import DEFAULT, Given, keys, toml
from equipoise.spec.run.model import ModelSection
from equipoise.spec.run.wish import Wish, nearest_multiples

_HF = "hf:"
# The keys of [model] that are sizes, named as in ModelSpec.
SIZES = tuple(
    field.name
    for field in dataclasses.fields(ModelSection)
    if field.name in {other.name for other in dataclasses.fields(ModelSpec)}
)
# Those that describe experts, with their values for a model without.
_OF_EXPERTS = {
    field.name: field.default
    for field in dataclasses.fields(ModelSpec)
    if field.name in SIZES[SIZES.index("experts") + 1 :]
}
_OTHER_TOKENIZERS = ("tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json")
# Those that a published config.json does not contain.
_TRAINING = ("balance", "balance_rate", "capacity_factor")


def resolve_model(wish: Wish, base: Path) -> tuple[ModelSpec, dict[str, str]]:
    """The model of a run, and the origin of each size that its keys do not give.

    Args:
        wish: Values of all keys; mismatches are added to it.
        base: The folder that relative paths refer to.
    """
    init = wish["model.init"]
    if wish["model.engine"] == "transformers":
        _judge_engine(wish)
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
                f"Nearest: {nearest_multiples(model.head_width, 2)}.",
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
                f"tokenizer that is trained. Give at least {wish['data.vocab']}.",
            )
    return model, origins


def _is_set(wish: Wish, size: str) -> bool:
    return wish[f"model.{size}"] is not None


def _cite_size(model: ModelSpec, origins: Mapping[str, str], wish: Wish, size: str) -> str:
    origin = origins.get(f"model.{size}", wish.given[f"model.{size}"].origin.label)
    return f"model.{size} = {getattr(model, size)} ({origin})"


def _judge_width(wish: Wish, model: ModelSpec, origins: Mapping[str, str]) -> None:
    pair = 2 * model.heads
    if model.hidden % pair == 0:
        return
    around = nearest_multiples(model.hidden, pair)
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
            f"{_cite_size(model, origins, wish, 'hidden')} does not divide into {model.heads} "
            f"heads of an even width. Set model.hidden to {around}, or give model.head_width.",
        )


def _judge_heads(wish: Wish, model: ModelSpec, origins: Mapping[str, str]) -> None:
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


def _fill_experts(wish: Wish, model: ModelSpec, origins: dict[str, str]) -> ModelSpec:
    """Fill in sizes of experts that were not given, and report mismatches."""
    if not model.experts:
        for size, without in _OF_EXPERTS.items():
            if _is_set(wish, size) and getattr(model, size) != without:
                wish.tell(
                    f"model.{size}",
                    f"{toml(getattr(model, size))} says something of experts, and there are "
                    f"none: {_cite_size(model, origins, wish, 'experts')}. Set model.experts.",
                )
        return model
    if model.identity_experts and not _is_set(wish, "balance"):
        model = dataclasses.replace(model, balance="bias")
        origins["model.balance"] = "bias, which model.identity_experts need"
    for size in ("top_k", "expert_ffn"):
        if _is_set(wish, size) and not getattr(model, size):
            wish.tell(
                f"model.{size}",
                f"0 leaves {model.experts} experts without anything to compute. Give 1 or more, or "
                f"leave it out.",
            )
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
    _judge_identity(wish, model)
    if model.shortcut and not model.shared_ffn:
        wish.tell(
            "model.shortcut",
            "true lets rows of experts travel beside the shared expert, and there is none: "
            f"{_cite_size(model, origins, wish, 'shared_ffn')}. Set model.shared_ffn, for example "
            f"to model.ffn = {model.ffn}, or remove model.shortcut.",
        )
    if model.identity_experts and not model.real_top_k:
        model = dataclasses.replace(model, real_top_k=model.mean_top_k)
        origins["model.real_top_k"] = "an even choice"
    if not model.sparse_layers:
        at = "dense_layers" if wish.is_given("model.dense_layers") else "expert_every"
        wish.tell(
            f"model.{at if wish.is_given(f'model.{at}') else 'experts'}",
            f"none of {model.layers} layers has experts: not the first {model.dense_layers}, and "
            f"of the others those whose number is a multiple of {model.expert_every}. Lower "
            "model.dense_layers or model.expert_every.",
        )
    return model


def _judge_identity(wish: Wish, model: ModelSpec) -> None:
    """Refuse what experts without weights do not go with."""
    if not model.identity_experts:
        if model.real_top_k:
            wish.tell(
                "model.real_top_k",
                f"{model.real_top_k:g} of {model.top_k} experts on average needs experts without "
                f"weights. Set model.identity_experts, or remove model.real_top_k.",
            )
        return
    if model.balance != "bias":
        wish.tell(
            "model.balance",
            f'"{model.balance}" does not hold the mean number of experts with weights. Set '
            f'model.balance = "bias", or remove model.identity_experts.',
        )
    if model.real_top_k > min(model.top_k, model.experts):
        wish.tell(
            "model.real_top_k",
            f"{model.real_top_k:g} experts on average is more than the {model.top_k} that a token "
            f"passes through. Set it to {model.top_k} or less.",
        )
    if model.capacity_factor:
        wish.tell(
            "model.capacity_factor",
            f"{model.capacity_factor:g} limits an even share, which tokens do not have with "
            f"{model.identity_experts} experts without weights. Set it to 0, or remove "
            f"model.identity_experts.",
        )


def _judge_engine(wish: Wish) -> None:
    """Refuse what the modules of transformers do not do here."""
    said = f"{wish.cite('model.engine')} computes the model with transformers' own modules"
    if wish["model.init"].removeprefix(_HF) in ("", wish["model.init"]):
        wish.tell(
            "model.engine",
            f'"transformers" builds the model of a folder, but {wish.cite("model.init")}. Set '
            'model.init = "hf:DIR", a folder with config.json and, unless weights are to be '
            "random, *.safetensors.",
        )
    for axis, what in (
        ("tp", "cannot be split over ranks"),
        ("pp", "cannot be cut into stages"),
        ("ep", "keep all experts on each rank"),
        ("etp", "keep all experts on each rank"),
    ):
        if wish.is_sound(f"layout.{axis}") and wish[f"layout.{axis}"] > 1:
            wish.tell(
                f"layout.{axis}",
                f"{wish[f'layout.{axis}']} ranks, but {said}, which {what}. Set layout.{axis} = 1 "
                "and use layout.dp, layout.zero and layout.cp.",
            )
    if wish.is_sound("experts.policy") and wish["experts.policy"] != "fixed":
        wish.tell(
            "experts.policy",
            f"{toml(wish['experts.policy'])} lets ranks compute each other's experts, but {said}, "
            'which keep all experts on each rank. Set experts.policy = "fixed".',
        )
    if wish.is_sound("experts.memory_mib") and wish["experts.memory_mib"]:
        wish.tell(
            "experts.memory_mib",
            f"{toml(wish['experts.memory_mib'])} lets experts lie in a file, but {said}, which "
            f"keep all experts on each rank. Set experts.memory_mib = 0.",
        )
    if wish["train.recompute"] in ("attention", "selective"):
        wish.tell(
            "train.recompute",
            f"{toml(wish['train.recompute'])} recomputes a part of a layer, but {said}, which "
            'recompute whole layers. Nearest: "every-2", "every-3", "every-4", "full".',
        )


def judge_experts(wish: Wish, model: ModelSpec) -> None:
    """Refuse to balance, or to keep in a file, experts that are not there; and an unread table."""
    is_read = wish.is_sound("experts.policy") and wish["experts.policy"] == "speculative"
    if wish.is_sound("experts.policy", "experts.routes") and wish["experts.routes"] and not is_read:
        wish.tell(
            "experts.routes",
            f"{toml(wish['experts.routes'])} is given, but {wish.cite('experts.policy')} reads "
            f'no table. Set experts.policy = "speculative", or leave it out.',
        )
    is_known = all(each.key not in ("model.init", "model.preset") for each in wish.faults)
    if not wish.is_sound("model.experts") or not is_known or wish["model.engine"] == "transformers":
        return
    for name, unset, what in (
        ("experts.policy", "fixed", "balances experts"),
        ("experts.memory_mib", 0, "is memory for experts"),
    ):
        if wish.is_sound(name) and wish[name] != unset and not model.experts:
            wish.tell(
                name,
                f"{toml(wish[name])} {what}, but the model has none. Set model.experts, or "
                f"{name} = {toml(unset)}.",
            )
    if wish.is_sound("experts.memory_mib") and wish["experts.memory_mib"] and model.experts:
        _judge_file_of_experts(wish)


_WITH_FILE = {
    "layout.zero": 3,
    "layout.pp": 1,
    "layout.etp": 1,
    "layout.replicas": 1,
    "layout.parts": 1,
    "experts.policy": "fixed",
    "lora.rank": 0,
}
"""What experts in a file are proven with."""


def _judge_file_of_experts(wish: Wish) -> None:
    """Refuse what experts in a file are not proven with."""
    for name, proven in _WITH_FILE.items():
        if wish.is_sound(name) and wish[name] != proven:
            wish.tell(
                "experts.memory_mib",
                f"{toml(wish['experts.memory_mib'])} puts experts in a file, which is not proven "
                f"with {wish.cite(name)}. Set {name} = {toml(proven)}, or experts.memory_mib = 0.",
            )


def _resolve_hf(wish: Wish, base: Path, folder: str) -> tuple[ModelSpec, dict[str, str]]:
    is_theirs = wish["model.engine"] == "transformers"
    for name in ("preset", *(size for size in SIZES if is_theirs or size not in _TRAINING)):
        if wish.is_given(f"model.{name}"):
            wish.tell(
                f"model.{name}",
                f"given beside model.init = {toml(wish['model.init'])} "
                f"({wish.given['model.init'].origin.label}), whose config.json holds the sizes. "
                "Remove one of them.",
            )
    fallback = PRESETS[keys()["model.preset"].default]
    try:
        config = read_json(base / user_path(folder) / "config.json")
        if not isinstance(config, dict):
            raise ValueError("it does not hold an object")
        model = (model_from_other_config if is_theirs else model_from_hf_config)(config)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        wish.tell(
            "model.init",
            f"cannot read {folder}/config.json: {reason}. "
            "Name a folder that holds config.json and *.safetensors.",
        )
        return fallback, {}
    except ValueError as error:
        wish.tell("model.init", f"{folder}/config.json cannot be read: {error}.")
        return fallback, {}
    except ModelError as error:
        way = "" if is_theirs else ' To train it as it is, set model.engine = "transformers".'
        wish.tell("model.init", f"{folder}/{error}{way}")
        return fallback, {}
    _take_tokenizer(wish, base, folder)
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


def _take_tokenizer(wish: Wish, base: Path, folder: str) -> None:
    """Use the tokenizer of the model's folder unless another is named."""
    if wish.is_given("data.tokenizer") or not wish.is_sound(
        "data.tokenizer", "data.format", "data.mix"
    ):
        return
    whole = base / user_path(folder)
    if (whole / TOKENIZER_FILE).is_file():
        origin = dataclasses.replace(DEFAULT, label=f"model.init = {toml(wish['model.init'])}")
        wish.given["data.tokenizer"] = Given(folder, origin)
        return
    others = [name for name in _OTHER_TOKENIZERS if (whole / name).is_file()]
    if others:
        wish.tell(
            "model.init",
            f"{folder} has {others[0]} but no {TOKENIZER_FILE}, the only tokenizer file that is "
            f"read. Write it with transformers: AutoTokenizer.from_pretrained({folder!r})"
            f".save_pretrained({folder!r}).",
        )
    else:
        kinds = [each.format or wish["data.format"] for each in wish["data.mix"]]
        kind = next((each for each in kinds or [wish["data.format"]] if each != "text"), None)
        if kind is None:
            return
        asked = f"data.mix with format = {toml(kind)}" if kinds else wish.cite("data.format")
        wish.tell(
            "model.init",
            f"{folder} has no {TOKENIZER_FILE}, and {asked} needs the model's own. Copy it there, "
            "or set data.tokenizer to the folder that has it.",
        )
