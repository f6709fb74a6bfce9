"""Open a trained model, whatever it lies in: a run, a checkpoint, a Hugging Face folder, GGUF.

What it decides
    Where the small files of a checkpoint come from: its run's folder kept those of the Hugging
    Face folder that the run began from; a run from random weights has its corpus's tokenizer,
    whose end token ends a text.

Kept true (tests/oracle/test_convert.py, tests/oracle/test_round_trip.py)
    The newest whole checkpoint of a run is taken, and a torn one never read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from equipoise.base.errors import CheckpointError, DataError, SpecError
from equipoise.checkpoint.export import read_checkpoint_weights
from equipoise.checkpoint.manifest import MANIFEST, Manifest, newest_good, read_manifest
from equipoise.data.cache.store import open_store
from equipoise.data.model_files import files_to_keep
from equipoise.nn.hf.files import (
    CONFIG,
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    KeptFiles,
    ModelFiles,
    as_json,
    read_files,
    read_kept,
)
from equipoise.nn.hf.gguf import read_gguf, read_gguf_header
from equipoise.nn.hf.read import read_hf
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.names import CHECKPOINTS, HF, RESOLVED
from equipoise.spec.run.resolved import read_resolved

_GIVE = "Give a run, a checkpoint, a Hugging Face folder, or a .gguf file."


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
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """For a run from a Hugging Face folder, the dtype of each weight there, by its name there."""
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
        raise SpecError(f"No such file or folder: {source}. {_GIVE}")
    if source.is_file():
        if source.suffix == ".gguf":
            return open_gguf(source)
        raise SpecError(f"{source} is not a .gguf file. {_GIVE}")
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
        f"(no {MANIFEST}) or a Hugging Face folder (no {CONFIG}). {_GIVE}"
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


def open_gguf(file: Path) -> TrainedModel:
    """Read a GGUF file, dequantised to fp32.

    Raises:
        ModelError: as ``nn.hf.gguf.read_gguf``.
    """
    header = read_gguf_header(file)
    model, state, tokenizer_json = read_gguf(file)
    contents = {GENERATION: as_json(header.generation_config)} if header.generation_config else {}
    remarks: tuple[str, ...] = ()
    if tokenizer_json is None:
        remarks = (
            f"The tokenizer in {file} is not a byte-level BPE that can be read. Give the model's "
            "tokenizer.json with --tokenizer.",
        )
    else:
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **header.tokenizer_config,
        }
        contents |= {TOKENIZER: tokenizer_json.encode(), TOKENIZER_CONFIG: as_json(settings)}
    files = ModelFiles(contents, str(file))
    return TrainedModel(
        file, model, state, files, context_tokens=header.context_tokens, remarks=remarks
    )


def _open_checkpoint(
    folder: Path, manifest: Manifest, remarks: tuple[str, ...] = ()
) -> TrainedModel:
    model, state = read_checkpoint_weights(folder, manifest)
    run = folder.resolve().parent.parent
    kept = read_kept(run / HF) or _kept_by_earlier_version(run)
    if TOKENIZER not in kept.files.contents:
        remarks = (
            *remarks,
            f"No tokenizer for {folder}: its run's {RESOLVED} or its token cache is missing or "
            "damaged. Give one with --tokenizer.",
        )
    return TrainedModel(
        folder,
        model,
        state,
        kept.files,
        manifest.step,
        manifest.context_tokens,
        kept.dtypes,
        (*remarks, *kept.remarks),
    )


def _kept_by_earlier_version(run: Path) -> KeptFiles:
    """The tokenizer of a run that kept no files, if its token cache is still there."""
    try:
        store = open_store(Path(read_resolved(run).corpus))
        return files_to_keep(None, store.tokenizer_file)
    except (SpecError, DataError):
        return KeptFiles(ModelFiles({}, str(run)), "", {}, ())
