"""Weights of a Hugging Face folder, read by our names.

Why
    A run may start from a published model: a folder of config.json and safetensors files.

What it decides
    Names are those of ``hf_names``. Nothing is renamed by guessing and nothing is skipped
    silently: a weight that is missing, left over or has another shape is an error, because a
    model that runs with a random layer looks like a bad model.

Kept true (tests/oracle/test_transformers.py, tests/unit/nn/hf/test_read.py)
    What ``transformers`` and ``nn.hf.write`` write is read with equal logits.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from equipoise.base.errors import ModelError
from equipoise.base.read import read_json, reason, require_file
from equipoise.nn.decoder import Decoder
from equipoise.nn.hf.files import CONFIG
from equipoise.nn.hf.names import TheirWeight, hf_names, split_theirs, their_weights
from equipoise.nn.hf.weights import (
    TIED_HEAD,
    names_to_read,
    require_once,
    some,
    weight_files,
)
from equipoise.spec.model.hf_config import model_from_hf_config
from equipoise.spec.model.presets import ModelSpec

TRAINING_SIZES = ("balance", "balance_rate", "capacity_factor")
"""Fields of a ModelSpec that no config.json has: choices of the run."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPE_CODES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
FLOATS = frozenset(_DTYPE_CODES.values())
"""torch's names of safetensors' dtypes that a weight can have."""


def weight_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a decoder, in its own order, without allocating any."""
    with torch.device("meta"):
        decoder = Decoder(model)
    return {name: tuple(weight.shape) for name, weight in decoder.named_parameters()}


def weights_of(model: ModelSpec, model_type: str) -> dict[str, TheirWeight]:
    """Every weight of a folder of this model, by its name there."""
    return their_weights(
        weight_shapes(model).items(),
        model_type=model_type,
        experts=model.experts,
        head_width=model.head_width,
    )


def read_hf(
    folder: Path, config: Mapping[str, Any] | None = None
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Read the sizes and the weights of a Hugging Face folder.

    Args:
        folder: Holds config.json and model.safetensors, or model.safetensors.index.json and
            the shards that it names, of one of ``spec.model.hf_config.MODEL_TYPES``.
        config: Stands for its config.json.

    Returns:
        The model, and its weights by our names, each in the file's dtype.

    Raises:
        ModelError: a file is missing or damaged, the decoder does not compute this kind of
            model, or a weight is missing, left over, or has another shape.
    """
    config = _read_config(folder) if config is None else config
    model, model_type = model_from_hf_config(config), config["model_type"]
    files = weight_files(folder)
    held: dict[str, Tensor] = {}
    for file, names in files.items():
        read = _read_tensors(file, names)
        require_once(file, read, held)
        held |= read
    if model.tied and TIED_HEAD in held:
        # Some writers store a tied head as well; transformers ties it whatever it holds.
        table = hf_names("embed.weight")[0]
        head, embed = held.pop(TIED_HEAD), held.get(table)
        if embed is None or not torch.equal(head, embed):
            raise ModelError(
                f"{folder}: config.json ties the head to the embedding, and {TIED_HEAD} differs "
                f"from {table}. Set tie_word_embeddings to false to keep it."
            )
    theirs = weights_of(model, model_type)
    expected = {name: weight.shape for name, weight in theirs.items()}
    check_weights(f"{folder}", held, expected, described_by="config.json")
    return model, split_theirs(theirs, held)


def load_hf(decoder: Decoder, folder: Path) -> None:
    """Fill a decoder with the weights of a Hugging Face folder, in the decoder's dtype.

    Raises:
        ModelError: as ``read_hf``; or the folder's model has other sizes.
    """
    model, state = read_hf(folder)
    # Folders do not record how a router is balanced during training.
    model = dataclasses.replace(
        model, **{key: getattr(decoder.model, key) for key in TRAINING_SIZES}
    )
    if model != decoder.model:
        differing = ", ".join(
            f"{key} {getattr(model, key)} (here: {getattr(decoder.model, key)})"
            for key in ModelSpec.__slots__
            if getattr(model, key) != getattr(decoder.model, key)
        )
        raise ModelError(
            f"{folder} holds another model: {differing}. Leave these sizes out of [model] to take "
            "them from the folder."
        )
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            weight.copy_(state.pop(name))


def stored_dtypes(folder: Path) -> dict[str, str]:
    """The dtype of every weight in a Hugging Face folder, by its name there and torch's name.

    What is not of ``FLOATS``, such as a mask that an old writer stored, has safetensors' code.

    Raises:
        ModelError: a file is missing or damaged.
    """
    dtypes: dict[str, str] = {}
    for file in weight_files(folder):
        try:
            require_file(file)
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    code = opened.get_slice(name).get_dtype()
                    dtypes[name] = _DTYPE_CODES.get(code, code)
        except (OSError, SafetensorError) as error:
            raise _damaged(file, error) from None
    return dtypes


def check_weights(
    where: str,
    held: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    *,
    described_by: str,
) -> None:
    """Refuse weights that are not exactly the expected ones.

    Raises:
        ModelError: names the weights that are missing, left over, have another shape or are not
            floats.
    """
    count = len(expected)
    if missing := [name for name in expected if name not in held]:
        raise ModelError(
            f"{where}: no {some(missing)} among the {len(held)} weights; {described_by} calls "
            f"for {count}."
        )
    if surplus := sorted(set(held) - set(expected)):
        raise ModelError(
            f"{where}: {some(surplus)} left over; {described_by} calls for {count} weights, "
            "and this decoder has no others."
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
                f"{where}: {name} has dtype {kind}. Only unquantised float weights can be read."
            )


def _read_config(folder: Path) -> Mapping[str, Any]:
    try:
        config: Mapping[str, Any] = read_json(folder / CONFIG)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder} is not a Hugging Face folder: its {CONFIG} cannot be read ({reason(error)})."
        ) from None
    return config


def _read_tensors(file: Path, names: list[str] | None) -> dict[str, Tensor]:
    try:
        require_file(file)
        with safe_open(file, framework="pt") as opened:
            wanted = names_to_read(file, opened.keys(), names)
            return {name: opened.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError) as error:
        raise _damaged(file, error) from None


def _damaged(file: Path, error: Exception) -> ModelError:
    return ModelError(f"{file} cannot be read: {reason(error)}. Download it again.")
