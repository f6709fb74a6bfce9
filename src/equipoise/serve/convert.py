"""Write a trained model as a Hugging Face folder: ``equipoise convert`` as a call.

What it decides
    What config.json says. A model that began from a folder gets that folder's config.json back,
    every key of it; changed are only the positions, raised where it was trained with longer
    windows, and the dtype where another is asked for. Weights are written in the dtype that they
    had in the folder; those of a model from random weights as trained, in fp32. Positions from
    which RoPE is computed stay, and that is said.

Kept true (tests/oracle/test_convert.py, tests/oracle/test_round_trip.py)
    A folder that is trained for no step and converted has equal files and equal weights, bit for
    bit. What differs from the folder's files is said in a sentence.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from equipoise.base.errors import ModelError
from equipoise.base.read import read_json
from equipoise.data.model_files import with_tokenizer
from equipoise.data.text.tokenizer import load_tokenizer
from equipoise.nn.hf.files import (
    CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ModelFiles,
    as_json,
)
from equipoise.nn.hf.names import hf_names
from equipoise.nn.hf.read import TRAINING_SIZES
from equipoise.nn.hf.write import cast_weight, write_hf
from equipoise.serve.source import TrainedModel
from equipoise.serve.tokenizer import has_template
from equipoise.spec.model.hf_config import model_from_hf_config
from equipoise.spec.model.other_config import model_from_other_config

Dtype = Literal["fp32", "bf16", "fp16"]
_TORCH: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_POSITIONS = "max_position_embeddings"
_ORIGINAL = "original_max_position_embeddings"
_OF_POSITIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("yarn", "longrope", "su"), ("factor", _ORIGINAL)),
    "llama3": (_ORIGINAL,),
}
"""Settings of types of RoPE that follow from ``max_position_embeddings`` where they are not given,
as ``dynamic`` always does: transformers 5.23, modeling_rope_utils."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was written."""

    model_type: str
    dtype: str
    """``fp32``, ``bf16``, ``fp16``, another by torch's name, or ``mixed``."""
    has_tokenizer: bool
    has_template: bool
    """Whether it has a chat template."""
    remarks: tuple[str, ...]
    """How the folder differs from the one that the model began from, in sentences."""


def write_folder(
    trained: TrainedModel,
    target: Path,
    *,
    dtype: Dtype | None = None,
    tokenizer_file: Path | None = None,
) -> Written:
    """Write a model as a folder that ``transformers`` loads, whole or not at all.

    Args:
        trained: What ``serve.source`` opened.
        target: The folder to make; must not exist.
        dtype: Of all weights. Unless given they have the dtype of the folder that the model began
            from, else the one that they are stored in.
        tokenizer_file: A tokenizer.json that takes the place of the model's own.

    Raises:
        ModelError: no Hugging Face model type computes the model, the folder cannot be written,
            or a weight does not fit the dtype.
        DataError: the tokenizer.json cannot be read.
    """
    files = trained.files
    if tokenizer_file is not None:
        files = with_tokenizer(files, load_tokenizer(tokenizer_file))
    remarks, model_type = list(trained.remarks), ""
    if CONFIG in files.contents:
        config = files.table(CONFIG)
        _require_same_sizes(trained, config)
        files, raised = _with_positions(files, trained)
        remarks += raised
        model_type = config["model_type"]
        if dtype is not None:
            files = _with_dtype(files, _name(_TORCH[dtype]))
    if trained.theirs is not None:
        # It takes seconds to import, and is an extra.
        from equipoise.serve.theirs import write_theirs

        dtypes = write_theirs(
            trained.theirs,
            target,
            files.contents,
            dtype=_their_dtype(trained, dtype),
            dtypes=trained.dtypes,
        )
    else:
        state = _cast(trained, dtype, model_type)
        write_hf(
            target,
            trained.model,
            state,
            files=files.contents,
            context_tokens=trained.context_tokens,
        )
        dtypes = {weight.dtype for weight in state.values() if weight.is_floating_point()}
    short = {each: name for name, each in _TORCH.items()}
    one = next(iter(dtypes))
    return Written(
        model_type=read_json(target / CONFIG)["model_type"],
        dtype="mixed" if len(dtypes) > 1 else short.get(one, _name(one)),
        has_tokenizer=TOKENIZER in files.contents,
        has_template=has_template(files),
        remarks=tuple(remarks),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cast(trained: TrainedModel, dtype: Dtype | None, model_type: str) -> dict[str, Tensor]:
    """The weights in the dtypes that they are written in.

    Raises:
        ModelError: a finite weight is infinite there.
    """
    state: dict[str, Tensor] = {}
    for name, weight in trained.state.items():
        target = weight.dtype if dtype is None else _TORCH[dtype]
        if dtype is None and trained.dtypes and weight.is_floating_point():
            theirs = hf_names(name, model_type=model_type, experts=trained.model.experts)[0]
            target = getattr(torch, trained.dtypes.get(theirs, _name(target)))
        state[name] = cast_weight(name, weight, target)
    return state


def _their_dtype(trained: TrainedModel, dtype: Dtype | None) -> torch.dtype | None:
    """The one dtype of a model of transformers; None where each weight has its own."""
    if dtype is not None:
        return _TORCH[dtype]
    if trained.dtypes:
        return None
    config = trained.files.table(CONFIG)
    known = config.get("dtype") or config.get("torch_dtype")
    return next((each for each in _TORCH.values() if _name(each) == known), torch.float32)


def _require_same_sizes(trained: TrainedModel, config: dict[str, Any]) -> None:
    read = model_from_hf_config if trained.theirs is None else model_from_other_config
    of_training = {key: getattr(trained.model, key) for key in TRAINING_SIZES}
    if dataclasses.replace(read(config), **of_training) != trained.model:
        raise ModelError(
            f"{trained.files.where}/{CONFIG} describes another model than {trained.origin}. "
            f"Restore it from a copy of the run, or delete {trained.files.where} to convert by the "
            "sizes alone."
        )


def _with_positions(files: ModelFiles, trained: TrainedModel) -> tuple[ModelFiles, list[str]]:
    """Positions for the windows that the model was trained with, and what to say of them."""
    config, context_tokens = files.table(CONFIG), trained.context_tokens
    positions = config.get(_POSITIONS)
    if not isinstance(positions, int) or context_tokens is None or context_tokens <= positions:
        return files, []
    if scaled := _scaled_by_positions(config):
        return files, [
            f"{_POSITIONS} stays {positions:,}, because RoPE of type {scaled} is computed from it; "
            f"the run trained with windows of {context_tokens:,} tokens."
        ]
    contents = {**files.contents, CONFIG: as_json(config | {_POSITIONS: context_tokens})}
    settings = files.table(TOKENIZER_CONFIG)
    changed = _POSITIONS
    if settings.get("model_max_length") == positions:
        changed += " and the tokenizer's model_max_length"
        contents[TOKENIZER_CONFIG] = as_json(settings | {"model_max_length": context_tokens})
    return ModelFiles(contents, files.where), [
        f"{changed} {'are' if ' ' in changed else 'is'} raised from {positions:,} to "
        f"{context_tokens:,}: the run trained with windows of {context_tokens:,} tokens."
    ]


def _scaled_by_positions(config: dict[str, Any]) -> str:
    """The type of a model's RoPE if its frequencies are computed from its positions; else empty."""
    of_all = {key: config[key] for key in (_ORIGINAL,) if config.get(key) is not None}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name)
        if not isinstance(given, dict):
            continue
        for table in (given, *(each for each in given.values() if isinstance(each, dict))):
            kind, said = table.get("rope_type") or table.get("type"), {**of_all, **table}
            needs = _OF_POSITIONS.get(kind, ()) if isinstance(kind, str) else ()
            if kind == "dynamic" or any(said.get(each) is None for each in needs):
                return str(kind)
    return ""


def _with_dtype(files: ModelFiles, dtype: str) -> ModelFiles:
    config = files.table(CONFIG)
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype", "torch_dtype"]
    if all(config.get(key) == dtype for key in keys):
        return files
    changed = as_json(config | dict.fromkeys(keys, dtype))
    return ModelFiles({**files.contents, CONFIG: changed}, files.where)
