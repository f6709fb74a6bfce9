"""Open a trained model, whatever it lies in: a run, a checkpoint, a Hugging Face folder, GGUF.

What it decides
    Where the small files of a checkpoint come from: its run's folder kept those of the Hugging
    Face folder that the run began from; a run from random weights has its corpus's tokenizer,
    whose end token ends a text.

Kept true (tests/oracle/test_convert.py, tests/oracle/test_round_trip.py)
    The newest whole checkpoint of a run is taken, and a torn one never read.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from equipoise.base.errors import CheckpointError, DataError, ModelError, SpecError
from equipoise.checkpoint.export import read_checkpoint_weights
from equipoise.checkpoint.manifest import MANIFEST, Manifest, newest_good, read_manifest
from equipoise.data.cache.store import open_store
from equipoise.data.tokenizer import load_tokenizer
from equipoise.nn.hf.files import (
    CONFIG,
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ModelFiles,
    as_json,
    read_files,
)
from equipoise.nn.hf.read import read_hf
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.names import RESOLVED
from equipoise.spec.run.resolved import read_resolved

CHECKPOINTS = "checkpoint"


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model's sizes, weights and small files, read whole."""

    origin: Path
    """The checkpoint, folder or file that the weights are from."""
    model: ModelSpec
    state: dict[str, Tensor]
    """Weights by our names, as they are stored."""
    files: ModelFiles
    step: int | None = None
    context_tokens: int | None = None
    """The longest window that it was trained with [tokens], where known."""
    remarks: tuple[str, ...] = ()
    """What a person should know: a torn checkpoint passed over, a tokenizer that is missing."""


def open_model(source: Path) -> TrainedModel:
    """Read the model of a run, a checkpoint, or a Hugging Face folder.

    Raises:
        SpecError: nothing is there, or nothing that holds a model.
        CheckpointError: no checkpoint of the run is whole.
        ModelError: the folder holds a model that this decoder does not compute.
    """
    if not source.exists():
        raise SpecError(
            f"No such file or folder: {source}. Give a run, a checkpoint, or a Hugging Face folder."
        )
    if (source / MANIFEST).exists():
        return _open_checkpoint(source, read_manifest(source))
    if (source / CHECKPOINTS).is_dir() or (source / RESOLVED).exists():
        return open_run(source)
    if (source / CONFIG).exists():
        model, state = read_hf(source)
        files = read_files(source)
        longest = files.table(CONFIG).get("max_position_embeddings")
        longest = longest if isinstance(longest, int) else None
        return TrainedModel(source, model, state, files, context_tokens=longest)
    raise SpecError(
        f"{source} holds no model: it is not a run (it has no {CHECKPOINTS}/), a checkpoint "
        f"(no {MANIFEST}) or a Hugging Face folder (no {CONFIG}). Give one of them."
    )


def open_run(folder: Path) -> TrainedModel:
    """Read the newest whole checkpoint of a run.

    Raises:
        CheckpointError: there is none.
    """
    newest = newest_good(folder / CHECKPOINTS)
    if newest is None:
        raise CheckpointError(
            f"{folder} has no checkpoint yet. Train it further; checkpoint.every_steps says "
            "how often one is written."
        )
    path, manifest, torn = newest
    return _open_checkpoint(path, manifest, tuple(torn))


def _open_checkpoint(
    folder: Path, manifest: Manifest, remarks: tuple[str, ...] = ()
) -> TrainedModel:
    model, state = read_checkpoint_weights(folder, manifest)
    run = folder.resolve().parent.parent
    files = _files_of_run(run)
    if not files.contents:
        remarks = (
            *remarks,
            f"No tokenizer for {folder}: its run's {RESOLVED} or its token cache is missing or "
            "damaged. Give one with --tokenizer.",
        )
    return TrainedModel(
        folder, model, state, files, manifest.step, manifest.context_tokens, remarks
    )


def _files_of_run(run: Path) -> ModelFiles:
    try:
        file = open_store(Path(read_resolved(run).corpus)).tokenizer_file
        return with_tokenizer(ModelFiles({}, str(run)), file)
    except (SpecError, DataError):
        return ModelFiles({}, str(run))


def with_tokenizer(files: ModelFiles, file: Path) -> ModelFiles:
    """The files with another tokenizer.json, whose end token ends a text.

    Raises:
        DataError: the file is not a tokenizer.json, or has no end token.
    """
    tokenizer = load_tokenizer(file)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": tokenizer.core.id_to_token(tokenizer.end),
    }
    return ModelFiles(
        {
            **files.contents,
            TOKENIZER: file.read_bytes(),
            TOKENIZER_CONFIG: as_json(settings),
            GENERATION: as_json({"eos_token_id": tokenizer.end}),
        },
        files.where,
    )


def require_tokenizer(trained: TrainedModel) -> None:
    """Refuse a model without a tokenizer that can be read.

    Raises:
        ModelError: it has none.
    """
    if TOKENIZER not in trained.files.contents:
        raise ModelError(
            f"{trained.files.where} has no {TOKENIZER}, which turns text into tokens. Put the "
            "model's there; transformers writes it: "
            f'AutoTokenizer.from_pretrained("...").save_pretrained("...").'
        )
