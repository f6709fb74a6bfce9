"""Weights of a Hugging Face folder, in and out.

Why
    A run may start from a published model, and what it trained must be read by every other
    program of this field. Both are the folder of config.json and safetensors files.

What it decides
    The names are those of ``hf_names``. Nothing is renamed by guesswork and nothing is skipped
    in silence: a weight that is missing, left over or of another shape is an error, because a
    model that runs with a random layer looks like a bad model.

    Our rotary pairs are half-split, as theirs are, so no row is permuted.

Kept true (tests/oracle/test_transformers.py, tests/unit/nn/test_hf.py)
    ``transformers`` reads what is written here and we read what it writes, with equal logits;
    a folder is whole or not there at all.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from equipoise.base.errors import ModelError
from equipoise.base.units import GIB
from equipoise.nn.decoder import Decoder
from equipoise.nn.hf_names import hf_names
from equipoise.spec.hf_config import hf_config, model_from_hf_config
from equipoise.spec.model import ModelSpec

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Written by transformers before 4.32: a table that is computed from config.json.
_COMPUTED = ".rotary_emb.inv_freq"
_TIED_HEAD = "lm_head.weight"
_COUNTS = ".balance.state_X"
_OF_TRAINING = ("balance", "balance_rate", "capacity_factor")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NAMES_SHOWN = 3


def weight_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a decoder, in its own order, without making any."""
    with torch.device("meta"):
        decoder = Decoder(model)
    return {name: tuple(weight.shape) for name, weight in decoder.named_parameters()}


def _their_names(model: ModelSpec) -> dict[str, list[str]]:
    """The Hugging Face names of every weight, by ours."""
    model_type = str(hf_config(model)["model_type"])
    return {
        name: hf_names(name, model_type=model_type, experts=model.experts)
        for name in weight_shapes(model)
    }


def read_hf(folder: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Read the sizes and the weights of a Hugging Face folder.

    Args:
        folder: Holds config.json and model.safetensors, or model.safetensors.index.json and
            the shards that it names, of one of ``spec.hf_config.MODEL_TYPES``.

    Returns:
        The model, and its weights by our names, each in the dtype of the file.

    Raises:
        ModelError: a file is missing or damaged, the model is of a kind that the decoder
            does not compute, or a weight is missing, left over, or of another shape.
    """
    model = _read_config(folder)
    files = _weight_files(folder)
    held: dict[str, Tensor] = {}
    for file, names in files.items():
        held |= _read_tensors(file, names)
    if model.tied and _TIED_HEAD in held:
        # Some writers store a tied head as well; transformers ties it whatever it holds.
        table = hf_names("embed.weight")[0]
        head, embed = held.pop(_TIED_HEAD), held.get(table)
        if embed is None or not torch.equal(head, embed):
            raise ModelError(
                f"{folder}: config.json ties the head to the embedding, and {_TIED_HEAD} differs "
                f"from {table}. Set tie_word_embeddings to false to keep it."
            )
    theirs, expected = _their_names(model), dict[str, tuple[int, ...]]()
    for name, shape in weight_shapes(model).items():
        alone = shape if len(theirs[name]) == 1 else shape[1:]
        expected |= dict.fromkeys(theirs[name], alone)
    check_weights(f"{folder}", held, expected, described_by="config.json")
    return model, {
        name: held.pop(names[0])
        if len(names) == 1
        else torch.stack([held.pop(each) for each in names])
        for name, names in theirs.items()
    }


def load_hf(decoder: Decoder, folder: Path) -> None:
    """Fill a decoder with the weights of a Hugging Face folder, in the decoder's dtype.

    Raises:
        ModelError: as ``read_hf``; or the folder holds a model of other sizes.
    """
    model, state = read_hf(folder)
    # No folder says how a router is kept in balance while it is trained.
    model = dataclasses.replace(model, **{key: getattr(decoder.model, key) for key in _OF_TRAINING})
    if model != decoder.model:
        differing = ", ".join(
            f"{key} {getattr(model, key)} (here: {getattr(decoder.model, key)})"
            for key in ModelSpec.__slots__
            if getattr(model, key) != getattr(decoder.model, key)
        )
        raise ModelError(
            f"{folder} holds another model: {differing}. Leave these sizes out of [model], and "
            "they are taken from the folder."
        )
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            weight.copy_(state.pop(name))


def write_hf(
    folder: Path,
    model: ModelSpec,
    state: Mapping[str, Tensor],
    *,
    max_shard_bytes: int = 5 * GIB,
    tokenizer_file: Path | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    context_tokens: int | None = None,
) -> None:
    """Write a folder that ``transformers`` loads, whole or not at all.

    Args:
        folder: To be made; must not exist.
        model: Sizes of the weights.
        state: Every weight by our names, all of one dtype; a decoder's ``state_dict()``, of which
            the counts of routers are left out.
        max_shard_bytes: Weights beyond this are written as several files and an index.
        tokenizer_file: A tokenizer.json to go with the model.
        tokenizer_config: What tokenizer_config.json says beside it: ``eos_token``,
            ``bos_token``, ``chat_template``. The ids of its tokens go into config.json.
        context_tokens: ``max_position_embeddings``; transformers has its own default.

    Raises:
        ModelError: the folder exists, cannot be written, or the weights are not the model's.
    """
    if folder.exists():
        raise ModelError(f"{folder} exists already. Give the name of a new folder, or delete it.")
    state = {name: weight for name, weight in state.items() if not name.endswith(_COUNTS)}
    check_weights("The state", state, weight_shapes(model), described_by="the model")
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in state.values()})
    if len(dtypes) > 1:
        raise ModelError(f"The weights are of {' and '.join(dtypes)}. Convert them to one dtype.")
    config = hf_config(model) | {"dtype": dtypes[0], "torch_dtype": dtypes[0]}
    # Written even where unknown: LlamaConfig takes ids 1 and 2 where config.json has none.
    config |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if context_tokens is not None:
        config.setdefault("max_position_embeddings", context_tokens)
    partial = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        if tokenizer_file is not None:
            config |= _write_tokenizer(partial, tokenizer_file, tokenizer_config or {})
        _write_json(partial / CONFIG, config)
        _write_weights(partial, model, state, max_shard_bytes)
        for path in (*partial.iterdir(), partial):
            _sync(path)
        partial.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        words = getattr(error, "strerror", None) or error
        raise ModelError(
            f"{folder} could not be written ({words}). Free some space, or choose another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_weights(
    where: str,
    held: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    *,
    described_by: str,
) -> None:
    """Refuse weights that are not exactly the expected ones.

    Raises:
        ModelError: names what is missing, left over, of another shape or of no float dtype.
    """
    count = len(expected)
    if missing := [name for name in expected if name not in held]:
        raise ModelError(
            f"{where}: no {_some(missing)} among the {len(held)} weights; {described_by} calls "
            f"for {count}."
        )
    if surplus := sorted(set(held) - set(expected)):
        raise ModelError(
            f"{where}: {_some(surplus)} left over; {described_by} calls for {count} weights, "
            "and this decoder has no place for more."
        )
    for name, shape in expected.items():
        if tuple(held[name].shape) != shape:
            raise ModelError(
                f"{where}: {name} has shape {list(held[name].shape)}, and {described_by} calls "
                f"for {list(shape)}."
            )
        if held[name].dtype not in _DTYPES:
            kind = str(held[name].dtype).removeprefix("torch.")
            raise ModelError(
                f"{where}: {name} is of {kind}. Only unquantised float weights can be read."
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    rest = len(names) - _NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def _read_config(folder: Path) -> ModelSpec:
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder} is no Hugging Face folder: its {CONFIG} cannot be read "
            f"({getattr(error, 'strerror', None) or error})."
        ) from None
    return model_from_hf_config(config)


def _weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """Files to read, each with the names that the index expects of it."""
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: None}
    if not (folder / INDEX).is_file():
        held = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pth"))
        hint = f" It has {held[0]}, which may run code when it is read." if held else ""
        raise ModelError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}.{hint} Save the model as safetensors."
        )
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        files: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            # A shard's name is a name: no path of an index leads out of its folder.
            names = files.setdefault(folder / Path(file).name, [])
            assert names is not None  # noqa: S101 - only lists are put in
            names.append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder / INDEX} is damaged: it has no readable weight_map.") from error
    return files


def _read_tensors(file: Path, names: list[str] | None) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            held = set(opened.keys())
            if absent := [name for name in names or () if name not in held]:
                raise ModelError(
                    f"{file} lacks {_some(absent)}, which {INDEX} says it holds. Download it again."
                )
            return {
                name: opened.get_tensor(name)
                for name in sorted(held)
                if not name.endswith(_COMPUTED)
            }
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read ({error}). Download it again.") from None


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_tokenizer(
    folder: Path, tokenizer_file: Path, settings: Mapping[str, Any]
) -> dict[str, int]:
    """Copy the tokenizer, write its settings, and return the ids for config.json."""
    import tokenizers

    try:
        core = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{tokenizer_file} is no tokenizer.json: {error}.") from None
    shutil.copyfile(tokenizer_file, folder / "tokenizer.json")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **settings,
        },
    )
    ids: dict[str, int] = {}
    for kind in ("bos", "eos", "pad"):
        token = settings.get(f"{kind}_token")
        if token is not None and (number := core.token_to_id(token)) is not None:
            ids[f"{kind}_token_id"] = number
    return ids


def _shards(state: Mapping[str, Tensor], names: Iterable[str], max_bytes: int) -> list[list[str]]:
    """Names in order, in runs of at most so many bytes; a weight is never cut."""
    shards: list[list[str]] = [[]]
    size_bytes = 0
    for name in names:
        if shards[-1] and size_bytes + state[name].nbytes > max_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(name)
        size_bytes += state[name].nbytes
    return shards


def _write_weights(
    folder: Path, model: ModelSpec, state: Mapping[str, Tensor], max_shard_bytes: int
) -> None:
    shards = _shards(state, weight_shapes(model), max_shard_bytes)
    weight_map: dict[str, str] = {}
    theirs = _their_names(model)
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = WEIGHTS if len(shards) == 1 else file
        shard: dict[str, Tensor] = {}
        for name in names:
            whole = state[name].detach().cpu().contiguous()
            shard |= zip(theirs[name], [whole] if len(theirs[name]) == 1 else whole, strict=True)
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total_bytes = sum(weight.nbytes for weight in state.values())
        metadata = {"total_size": total_bytes}
        _write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
