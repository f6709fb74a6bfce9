"""Write weights as a Hugging Face folder.

Why
    Every other program of the field must be able to read a trained model, and what they read is a
    folder with config.json and safetensors files.

What it decides
    Weights are divided among files of limited size, with an index. A folder is written under
    another name and then renamed: it is whole or absent.

Kept true (tests/oracle/test_transformers.py, tests/unit/nn/hf/test_read.py)
    ``transformers`` reads what is written here, with equal logits; a failed write leaves nothing.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from equipoise.base.errors import ModelError
from equipoise.base.read import parse_json, reason
from equipoise.base.units import GIB
from equipoise.nn.hf.files import (
    CONFIG,
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ModelFiles,
    as_json,
    tokenizer_files,
    write_files,
)
from equipoise.nn.hf.folder import whole_folder
from equipoise.nn.hf.names import TheirWeight, join_theirs
from equipoise.nn.hf.read import check_weights, weight_shapes, weights_of
from equipoise.nn.hf.weights import INDEX, WEIGHTS
from equipoise.spec.model.hf_config import hf_config
from equipoise.spec.model.presets import ModelSpec

if TYPE_CHECKING:
    import tokenizers

_COUNTS = ".balance.state_X"


def write_hf(
    folder: Path,
    model: ModelSpec,
    state: Mapping[str, Tensor],
    *,
    files: Mapping[str, bytes] | None = None,
    max_shard_bytes: int = 5 * GIB,
    tokenizer_file: Path | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    context_tokens: int | None = None,
) -> None:
    """Write a folder that ``transformers`` loads, whole or not at all.

    Args:
        folder: The folder to make; must not exist.
        model: Sizes of the weights.
        state: Every weight by our names: a decoder's ``state_dict()``, without the counts of its
            routers.
        files: What stands beside the weights, by name. A config.json among them must describe the
            model, and its model type names the weights; without one it is made from the sizes.
        max_shard_bytes: Larger models are written as several files and an index.
        tokenizer_file: A tokenizer.json to write as well.
        tokenizer_config: The contents of its tokenizer_config.json: ``eos_token``, ``bos_token``,
            ``chat_template``.
        context_tokens: ``max_position_embeddings`` of a config.json that is made here; None leaves
            transformers' default.

    Raises:
        ModelError: the folder exists or cannot be written, the weights do not fit the model, or
            they have several dtypes and no config.json says so.
    """
    if folder.exists():
        raise ModelError(f"{folder} already exists. Name a new folder, or delete it.")
    state = {name: weight for name, weight in state.items() if not name.endswith(_COUNTS)}
    check_weights("The state", state, weight_shapes(model), described_by="the model")
    files = dict(files or {})
    if tokenizer_file is not None:
        files |= tokenizer_files(tokenizer_file.read_bytes(), tokenizer_config or {})
    if CONFIG not in files:
        files |= _new_files(
            ModelFiles(files, str(tokenizer_file or folder)), model, state, context_tokens
        )
    model_type = str(parse_json(files[CONFIG].decode())["model_type"])
    with whole_folder(folder) as partial:
        write_files(files, partial)
        _write_weights(partial, weights_of(model, model_type), state, max_shard_bytes)


def cast_weight(name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in another dtype; numbers that are not floats stay.

    Raises:
        ModelError: a finite value is infinite there.
    """
    if not weight.is_floating_point():
        return weight
    cast = weight.to(dtype)
    if dtype == torch.float16 and not torch.equal(cast.isfinite(), weight.isfinite()):
        raise ModelError(
            f"{name} reaches {float(weight.abs().max()):,.0f}, and fp16 holds at most 65,504. "
            "Write it with --dtype bf16 or --dtype fp32."
        )
    return cast


def _new_files(
    files: ModelFiles, model: ModelSpec, state: Mapping[str, Tensor], context_tokens: int | None
) -> dict[str, bytes]:
    """config.json of a model that began from random weights, and its generation_config.json.

    The ids of special tokens are those of the tokenizer among the files.
    """
    dtype = _one_dtype(state)
    config = hf_config(model) | {"dtype": dtype, "torch_dtype": dtype}
    if context_tokens is not None:
        config.setdefault("max_position_embeddings", context_tokens)
    # Ids are written even if unknown: without them LlamaConfig assumes 1 and 2.
    config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if TOKENIZER in files.contents:
        core, settings = _load(files), files.table(TOKENIZER_CONFIG)
        for kind in ("bos", "eos", "pad"):
            config[f"{kind}_token_id"] = _id_of(core, settings.get(f"{kind}_token"))
    made = {CONFIG: as_json(config)}
    if GENERATION not in files.contents and config["eos_token_id"] is not None:
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
        made[GENERATION] = as_json({key: each for key, each in ids.items() if each is not None})
    return made


def _id_of(core: "tokenizers.Tokenizer", token: object) -> int | None:
    """The id of a token as tokenizer_config.json names it: as text, or with its flags."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return core.token_to_id(text) if isinstance(text, str) else None


def _load(files: ModelFiles) -> "tokenizers.Tokenizer":
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(files.contents[TOKENIZER].decode())
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{files.where} is not a tokenizer.json: {reason(error)}.") from None


def _one_dtype(state: Mapping[str, Tensor]) -> str:
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in state.values()})
    if len(dtypes) > 1:
        raise ModelError(
            f"The weights have dtypes {' and '.join(dtypes)}. Convert them to one dtype."
        )
    return dtypes[0]


def _shards(weights: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Split the names, in order, into runs of at most ``max_bytes``; weights stay whole."""
    shards: list[list[str]] = [[]]
    size_bytes = 0
    for name, weight_bytes in weights.items():
        if shards[-1] and size_bytes + weight_bytes > max_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(name)
        size_bytes += weight_bytes
    return shards


def _write_weights(
    folder: Path,
    weights: Mapping[str, TheirWeight],
    state: dict[str, Tensor],
    max_shard_bytes: int,
) -> None:
    sizes = {
        name: math.prod(weight.shape) * state[weight.parts[0].name].element_size()
        for name, weight in weights.items()
    }
    shards = _shards(sizes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = WEIGHTS if len(shards) == 1 else file
        shard = {
            name: join_theirs(weights[name], state).detach().cpu().contiguous() for name in names
        }
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_bytes(as_json(index))
