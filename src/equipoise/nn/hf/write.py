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

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from equipoise.base.durable import sync
from equipoise.base.errors import ModelError
from equipoise.base.units import GIB
from equipoise.nn.hf.read import CONFIG, INDEX, WEIGHTS, check_weights, their_names, weight_shapes
from equipoise.spec.model.hf_config import hf_config
from equipoise.spec.model.presets import ModelSpec

_COUNTS = ".balance.state_X"


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
        folder: The folder to make; must not exist.
        model: Sizes of the weights.
        state: Every weight by our names, all of one dtype: a decoder's ``state_dict()``, without
            the counts of its routers.
        max_shard_bytes: Larger models are written as several files and an index.
        tokenizer_file: A tokenizer.json to copy beside the model.
        tokenizer_config: The contents of tokenizer_config.json: ``eos_token``, ``bos_token``,
            ``chat_template``. The ids of its tokens go into config.json.
        context_tokens: ``max_position_embeddings``; None leaves transformers' default.

    Raises:
        ModelError: the folder exists or cannot be written, or the weights do not fit the model.
    """
    if folder.exists():
        raise ModelError(f"{folder} already exists. Name a new folder, or delete it.")
    state = {name: weight for name, weight in state.items() if not name.endswith(_COUNTS)}
    check_weights("The state", state, weight_shapes(model), described_by="the model")
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in state.values()})
    if len(dtypes) > 1:
        raise ModelError(
            f"The weights have dtypes {' and '.join(dtypes)}. Convert them to one dtype."
        )
    config = hf_config(model) | {"dtype": dtypes[0], "torch_dtype": dtypes[0]}
    # Written even if unknown: without them LlamaConfig assumes ids 1 and 2.
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
            sync(path)
        partial.rename(folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        words = getattr(error, "strerror", None) or error
        raise ModelError(
            f"{folder} could not be written ({words}). Free some space or choose another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
        raise ModelError(f"{tokenizer_file} is not a tokenizer.json: {error}.") from None
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
    """Split the names, in order, into runs of at most ``max_bytes``; weights stay whole."""
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
    theirs = their_names(model)
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
