"""Checkpoints of models that transformers builds: opened, and written as a Hugging Face folder.

What it decides
    transformers writes the folder, under the names that its files have. config.json is the one that
    the run began from, key by key, except for the dtype; the tokenizer's and generation's files are
    those of that folder while it is still there. The folder is written under another name and then
    renamed: whole or absent.

Kept true (tests/multi/train/test_engine.py)
    A folder that is trained with a learning rate of nothing and converted has the same weights, bit
    for bit, and the same logits in transformers.
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.base.errors import CheckpointError, ModelError, SpecError
from equipoise.checkpoint.export import read_other_weights
from equipoise.nn.hf.folder import whole_folder
from equipoise.serve.their_checkpoint import TheirCheckpoint
from equipoise.spec.run.resolved import read_resolved

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
_LARGEST_BYTES = 64 << 20
"""Largest file that is taken over from the folder that a run began from."""


def load_checkpoint(checkpoint: TheirCheckpoint) -> "PreTrainedModel":
    """The model with its trained weights, in fp32.

    Raises:
        CheckpointError: a weight is missing or left over.
        ModelError: transformers cannot build the model.
    """
    from equipoise.parallel.theirs.build import build_random, read_theirs_config
    from equipoise.parallel.theirs.model import PREFIX

    folder = checkpoint.folder
    theirs = build_random(read_theirs_config(folder), seed=0)
    weights = read_other_weights(folder, PREFIX)
    told = theirs.load_state_dict(weights, strict=False)
    tied = set(getattr(theirs, "all_tied_weights_keys", None) or ())
    missing = sorted(set(told.missing_keys) - tied)
    if missing or told.unexpected_keys:
        wrong = [*missing, *told.unexpected_keys]
        raise CheckpointError(
            f"{folder} is of another model than its config.json: {wrong[0]} and "
            f"{len(wrong) - 1} more differ. Restore a copy of the checkpoint."
        )
    theirs.tie_weights()
    theirs.train(False)
    return theirs


def write_theirs(
    checkpoint: TheirCheckpoint, target: Path, *, dtype: str | None, tokenizer: Path | None
) -> dict[str, Any]:
    """Write a folder that transformers loads, and say what was written.

    Args:
        checkpoint: As ``find_theirs`` returns it.
        target: The folder to make; must not exist.
        dtype: Of all weights, a key of ``_DTYPES``; that of the config.json unless given.
        tokenizer: A tokenizer.json that takes the place of the folder's own.

    Raises:
        ModelError: the folder exists, or cannot be written.
        CheckpointError: the checkpoint cannot be read.
    """
    import torch

    from equipoise.parallel.theirs.build import said

    if target.exists():
        raise ModelError(f"{target} already exists. Name a new folder, or delete it.")
    theirs = load_checkpoint(checkpoint)
    config = json.loads((checkpoint.folder / "config.json").read_text())
    known = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = _DTYPES[dtype] if dtype else known if known in _DTYPES.values() else "float32"
    theirs = theirs.to(getattr(torch, name))
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    config |= dict.fromkeys(keys, name)
    with whole_folder(target) as partial:
        with said(checkpoint.folder):
            theirs.save_pretrained(partial)
        for file in _files_of_run(checkpoint):
            shutil.copyfile(file, partial / file.name)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, partial / "tokenizer.json")
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return {
        "folder": str(target),
        "from": str(checkpoint.folder),
        "step": checkpoint.manifest.step,
        "model_type": config["model_type"],
        "params": sum(weight.numel() for weight in theirs.parameters()),
        "dtype": next(short for short, long in _DTYPES.items() if long == name),
        "bytes": sum(path.stat().st_size for path in target.iterdir()),
        "tokenizer": (target / "tokenizer.json").exists(),
    }


def _files_of_run(checkpoint: TheirCheckpoint) -> list[Path]:
    """Files of the folder that a run began from, without config and weights."""
    try:
        resolved = read_resolved(checkpoint.folder.resolve().parent.parent)
    except SpecError:
        return []
    folder = Path(resolved.init_folder)
    if not resolved.init_folder or not folder.is_dir():
        return []
    return [
        file
        for file in sorted(folder.iterdir())
        if file.is_file()
        and not file.name.startswith(".")
        and not file.name.endswith(_WEIGHTS)
        and file.name != "config.json"
        and file.stat().st_size <= _LARGEST_BYTES
    ]
