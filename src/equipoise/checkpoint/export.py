"""Read only the weights of a checkpoint, in one process and without a process group.

What it decides
    Only the model's tensors are read: AdamW's moments, two thirds of the bytes, stay on disk.
    Adapters are merged into the weights that they stand beside.
    However many ranks wrote the checkpoint, each tensor comes out whole.

Kept true (tests/oracle/test_convert.py)
    The weights are bitwise those that were saved; a torn checkpoint is never read.
"""

import dataclasses
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from equipoise.base.errors import CheckpointError
from equipoise.base.read import reason
from equipoise.checkpoint.index import StoredTensor
from equipoise.checkpoint.index_first import read_any_index
from equipoise.checkpoint.manifest import OWN_ENGINE, Manifest, read_manifest
from equipoise.checkpoint.shards import ShardReader
from equipoise.nn.hf.adapter import is_adapter, merge_adapters
from equipoise.nn.hf.read import weight_shapes
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.lora import LoraSpec


def model_of(manifest: Manifest) -> ModelSpec:
    """The ModelSpec that a manifest holds as plain data.

    Raises:
        CheckpointError: a size is missing or unknown.
    """
    names = {field.name for field in dataclasses.fields(ModelSpec)}
    unknown = [key for key in manifest.model if key not in names]
    try:
        if unknown:
            raise ValueError(f"it does not know {unknown[0]}")
        return TypeAdapter(ModelSpec).validate_json(json.dumps(manifest.model), strict=True)
    except ValueError as error:
        raise CheckpointError(
            f"The manifest of step {manifest.step} was written by equipoise {manifest.version}, "
            f"whose model this version cannot read ({reason(error)}). Use that version."
        ) from error


def require_weights(folder: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint that lacks a weight of its model, or has it in another shape or dtype.

    Raises:
        CheckpointError: names the weight.
    """
    if manifest.engine != OWN_ENGINE:
        return  # the sizes do not say what weights it has
    index = read_any_index(folder)
    for name, shape in weight_shapes(model_of(manifest)).items():
        stored = index.get(f"model.{name}")
        if stored is None or stored.shape != shape:
            has = "does not have it" if stored is None else f"has {list(stored.shape)}"
            raise CheckpointError(
                f"{folder} is torn: its model has {name} of shape {list(shape)}, and the "
                f"checkpoint {has}."
            )
        _require_trained(folder, name, stored)


def _require_trained(folder: Path, name: str, stored: StoredTensor) -> None:
    """Refuse a weight in another dtype than all are trained in: reading would convert its bits.

    Raises:
        CheckpointError: names the weight.
    """
    if stored.dtype != "float32":
        raise CheckpointError(
            f"{folder} holds another model: its {name} is {stored.dtype}, and weights are trained "
            f"in float32. Restore a copy of it."
        )


def read_checkpoint_weights(
    folder: Path, manifest: Manifest | None = None
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Read a checkpoint's weights, whole, on the CPU.

    Args:
        folder: A checkpoint, such as ``runs/run/checkpoint/step-000250``.
        manifest: The folder's manifest, if just verified; without it every byte is verified.

    Returns:
        The model, and its weights by name as they were trained: fp32, adapters merged.

    Raises:
        CheckpointError: the checkpoint is torn, has a newer format, or lacks a weight.
    """
    manifest = manifest or read_manifest(folder)
    if manifest.engine != OWN_ENGINE:
        raise CheckpointError(
            f'{folder} was trained with model.engine = "{manifest.engine}": its weights are not '
            f"those of equipoise's own decoder. Turn it into a Hugging Face folder with equipoise "
            f"convert."
        )
    require_weights(folder, manifest)
    model = model_of(manifest)
    shapes = weight_shapes(model)
    held = adapter_shapes(folder)
    weights = _read(folder, {**shapes, **held})
    adapters = {name: weights.pop(name) for name in held}
    return model, merge_adapters(weights, adapters, lora_of(folder, manifest)) if held else weights


def adapter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's adapters; empty where it has none.

    Raises:
        CheckpointError: one has another dtype than it was trained in.
    """
    index = read_any_index(folder)
    names = {key: key.removeprefix("model.") for key in index if key.startswith("model.")}
    held = {name: index[key] for key, name in names.items() if is_adapter(name)}
    for name, stored in held.items():
        _require_trained(folder, name, stored)
    return {name: stored.shape for name, stored in held.items()}


def lora_of(folder: Path, manifest: Manifest) -> LoraSpec:
    """Rank, scale and layers of a checkpoint's adapters.

    Raises:
        CheckpointError: the manifest does not have them.
    """
    try:
        return LoraSpec(
            rank=int(manifest.run["lora.rank"]),
            alpha=float(manifest.run["lora.alpha"]),
            targets=tuple(map(str, manifest.run["lora.targets"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder} has adapters, and its manifest does not say their rank and scale."
        ) from error


def read_checkpoint_adapters(folder: Path) -> dict[str, Tensor]:
    """A checkpoint's adapters by name, whole, on the CPU.

    Raises:
        CheckpointError: it has none, or they cannot be read.
    """
    if not (shapes := adapter_shapes(folder)):
        raise CheckpointError(
            f"{folder} has no adapters: its run trained the model's own weights. Convert it "
            f"without --adapter."
        )
    return _read(folder, shapes)


def _read(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    weights = {name: torch.empty(shape) for name, shape in shapes.items()}
    _load(folder, {"model": weights})
    return weights


def read_moments(folder: Path) -> dict[str, dict[str, Tensor]]:
    """AdamW's state of each weight of a verified checkpoint, by the weight's name, on the CPU.

    Returns:
        ``exp_avg`` and ``exp_avg_sq`` in the weight's shape, and ``step``, a scalar; empty where
        the checkpoint has none.

    Raises:
        CheckpointError: they could not be read.
    """
    start = "optimizer.state."
    moments: dict[str, dict[str, Tensor]] = {}
    for key, stored in read_any_index(folder).items():
        if key.startswith(start):
            name, _, kind = key.removeprefix(start).rpartition(".")
            empty = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
            moments.setdefault(name, {})[kind] = empty
    if moments:
        _load(folder, {"optimizer": {"state": moments}})
    return moments


def read_other_weights(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Read the weights of a checkpoint of another engine, whole, on the CPU.

    Args:
        folder: A checkpoint whose manifest has been verified.
        prefix: What stands before the engine's own names.

    Returns:
        Weights and buffers by the engine's names, in the dtypes in which they are stored.

    Raises:
        CheckpointError: they could not be read.
    """
    start = f"model.{prefix}"
    weights = {
        name.removeprefix("model."): torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        for name, stored in read_any_index(folder).items()
        if name.startswith(start)
    }
    _load(folder, {"model": weights})
    return {name.removeprefix(prefix): weight for name, weight in weights.items()}


def _load(folder: Path, state: dict[str, Any]) -> None:
    """Fill the tensors of a state from a checkpoint, by their names there."""
    reader = ShardReader(folder)
    log = logging.getLogger("torch.distributed.checkpoint")
    level = log.level
    try:
        # torch logs its own traceback for an error that is raised here in one sentence.
        log.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            # torch warns about no_dist, which is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)
            load(state, storage_reader=reader, no_dist=True)
    except (CheckpointException, Exception) as error:  # the former does not derive from Exception
        raise CheckpointError(
            f"The weights of {folder} could not be read ({_cause(error)})."
        ) from error
    finally:
        log.setLevel(level)
        reader.close()


def _cause(error: BaseException) -> str:
    """The last line of this rank's error."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return lines[-1].rstrip(".") if lines else type(error).__name__
