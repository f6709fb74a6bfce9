"""Open a trained model, whatever it lies in: a run, a checkpoint, a Hugging Face folder, GGUF.

What it decides
    Where the small files of a checkpoint come from: its run's folder kept those of the Hugging
    Face folder that the run began from; a run from random weights has its corpus's tokenizer,
    whose end token ends a text.

    Who computes the model: our own decoder wherever it can, else transformers' own modules.

Kept true (tests/oracle/test_convert.py, tests/oracle/test_round_trip.py)
    The newest whole checkpoint of a run is taken, and a torn one never read.
"""

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from equipoise.base.errors import CheckpointError, DataError, ModelError, SpecError
from equipoise.base.read import read_bytes, real_path
from equipoise.checkpoint.manifest import (
    MANIFEST,
    OWN_ENGINE,
    Manifest,
    newest_good,
    read_manifest,
    read_steadily,
)
from equipoise.checkpoint.merge import Merger
from equipoise.data.cache.store import open_store
from equipoise.data.model_files import files_to_keep
from equipoise.nn.hf.files import (
    CONFIG,
    GENERATION,
    TOKENIZER,
    KeptFiles,
    ModelFiles,
    as_json,
    read_files,
    read_kept,
    tokenizer_files,
)
from equipoise.nn.hf.gguf import read_gguf_whole
from equipoise.nn.hf.read import read_hf
from equipoise.spec.model.hf_config import model_from_hf_config
from equipoise.spec.model.other_config import model_from_other_config
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.model.windows import without_windows
from equipoise.spec.names import CHECKPOINTS, HF, RESOLVED
from equipoise.spec.run.resolved import read_resolved

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GIVE = "Give a run, a checkpoint, a Hugging Face folder, or a .gguf file."


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model's sizes, weights and small files, read whole."""

    origin: Path
    """The checkpoint, folder or file that the weights are from."""
    model: ModelSpec
    state: dict[str, Tensor]
    """Weights by our names, as they are stored; empty where ``theirs`` has them."""
    files: ModelFiles
    step: int | None = None
    context_tokens: int | None = None
    """The longest window that it was trained with [tokens], where known."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """For a run from a Hugging Face folder, the dtype of each weight there, by its name there."""
    remarks: tuple[str, ...] = ()
    """What a person should know: a torn checkpoint passed over, a tokenizer that is missing."""
    theirs: "PreTrainedModel | None" = None
    """The model with its weights, where transformers computes it."""

    @property
    def params(self) -> int:
        """How many weights it has."""
        if self.theirs is None:
            return self.model.params
        return sum(weight.numel() for weight in self.theirs.parameters())


def open_model(source: Path | str, *, within_window: bool = False) -> TrainedModel:
    """Read the model of a run, a checkpoint, a Hugging Face folder, or a GGUF file.

    Args:
        source: Where it is.
        within_window: Read a folder whose layers have sliding windows as a model of our own
            decoder, whose texts then are no longer than the window.

    Raises:
        SpecError: nothing is there, or nothing that holds a model.
        CheckpointError: no checkpoint of the run is whole.
        ModelError: the model cannot be read, or nothing that is installed computes it.
    """
    source = Path(source)
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
        return _open_folder(source, within_window)
    raise SpecError(
        f"{source} holds no model: it is not a run (it has no {CHECKPOINTS}/), a checkpoint "
        f"(no {MANIFEST}) or a Hugging Face folder (no {CONFIG}). {_GIVE}"
    )


def open_merged(parts: Sequence[tuple[Path | str, float]]) -> TrainedModel:
    """Read several models and merge their weights; everything else is the first one's.

    Args:
        parts: Runs, checkpoints, folders or files, each with its share; shares add up to 1.

    Raises:
        SpecError: as ``open_model``, or two are the same.
        CheckpointError: likewise, or they are not one model.
        ModelError: likewise, or transformers computes one of them.
    """
    merger, first = Merger(), None
    given: dict[Path, Path | str] = {}
    for source, share in parts:
        trained = open_model(source)
        origin = real_path(trained.origin)
        if origin in given:
            raise SpecError(
                f"{given[origin]} and {source} are the same model, {origin}. Give each model once."
            )
        given[origin] = source
        if trained.theirs is not None:
            raise ModelError(
                f"{trained.origin} is computed by the modules of transformers, and only models of "
                f"equipoise's own decoder are merged."
            )
        if first is not None and trained.model != first.model:
            differing = [
                f"{field.name} {getattr(first.model, field.name)} and "
                f"{getattr(trained.model, field.name)}"
                for field in dataclasses.fields(ModelSpec)
                if getattr(first.model, field.name) != getattr(trained.model, field.name)
            ]
            raise CheckpointError(
                f"{first.origin} and {trained.origin} are not one model: {', '.join(differing)}. "
                f"Merge checkpoints of one model."
            )
        merger.add(str(trained.origin), trained.state, share)
        known = () if first is None else first.remarks
        remarks = tuple(dict.fromkeys((*known, *trained.remarks)))
        first = dataclasses.replace(first or trained, state={}, remarks=remarks)
    if first is None:
        raise SpecError(f"There is nothing to merge. {_GIVE}")
    return dataclasses.replace(first, state=merger.merged(), step=None)


def open_run(folder: Path) -> TrainedModel:
    """Read the newest whole checkpoint of a run.

    Raises:
        CheckpointError: there is none.
    """

    def read() -> TrainedModel:
        path, manifest, torn = _newest(folder)
        return _open_checkpoint(path, manifest, tuple(torn))

    return read_steadily(folder / CHECKPOINTS, read)


def _newest(folder: Path) -> tuple[Path, Manifest, list[str]]:
    newest = newest_good(folder / CHECKPOINTS)
    if newest is None:
        raise CheckpointError(
            f"{folder} has no checkpoint yet. Train it further; checkpoint.every_steps says "
            "how often one is written."
        )
    return newest


def _open_folder(folder: Path, within_window: bool) -> TrainedModel:
    """Read a Hugging Face folder."""
    files = read_files(folder)
    config = files.table(CONFIG)
    longest = config.get("max_position_embeddings")
    longest = longest if isinstance(longest, int) else None
    remarks: tuple[str, ...] = ()
    try:
        if within_window and (windowless := without_windows(config)) is not None:
            config, window = windowless
            if longest is None or window < longest:
                longest = window
                remarks = (
                    f"The layers of {folder} have sliding windows of {window:,} tokens, so prompt "
                    f"and answer together may have {window:,}: within them every layer reads all.",
                )
        model_from_hf_config(config)
    except ModelError as error:
        if not _has_transformers():
            raise ModelError(
                f"{folder}/{error} The modules of transformers may compute it: pip install "
                f"'equipoise[transformers]'."
            ) from error
        # It takes seconds to import, and is an extra.
        from equipoise.serve.theirs import load_folder

        sizes = model_from_other_config(config)
        theirs = load_folder(folder)
        return TrainedModel(folder, sizes, {}, files, context_tokens=longest, theirs=theirs)
    model, state = read_hf(folder, config)
    return TrainedModel(folder, model, state, files, context_tokens=longest, remarks=remarks)


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def require_transformers(folder: Path) -> None:
    """Refuse a checkpoint whose model cannot be built here.

    Raises:
        ModelError: transformers is not installed.
    """
    if not _has_transformers():
        raise ModelError(
            f'{folder} was trained with model.engine = "transformers", which is not installed. '
            f"Run: pip install 'equipoise[transformers]'"
        )


def open_gguf(file: Path) -> TrainedModel:
    """Read a GGUF file, dequantised to fp32.

    Raises:
        ModelError: as ``nn.hf.gguf.read_gguf``.
    """
    header, state, tokenizer_json = read_gguf_whole(file)
    contents = {GENERATION: as_json(header.generation_config)} if header.generation_config else {}
    remarks: tuple[str, ...] = ()
    if tokenizer_json is None:
        remarks = (
            f"The tokenizer in {file} is not a BPE that can be read. Give the model's "
            "tokenizer.json with --tokenizer.",
        )
    else:
        contents |= tokenizer_files(tokenizer_json.encode(), header.tokenizer_config)
    files = ModelFiles(contents, str(file))
    return TrainedModel(
        file, header.model, state, files, context_tokens=header.context_tokens, remarks=remarks
    )


def _open_checkpoint(
    folder: Path, manifest: Manifest, remarks: tuple[str, ...] = ()
) -> TrainedModel:
    # They import torch's checkpoints, for a second; a file of weights needs none of them.
    from equipoise.checkpoint.export import model_of, read_checkpoint_weights
    from equipoise.checkpoint.same import require_text_alone

    require_text_alone(manifest, folder)
    state, theirs = dict[str, Tensor](), None
    if manifest.engine == OWN_ENGINE:
        model, state = read_checkpoint_weights(folder, manifest)
    else:
        require_transformers(folder)
        from equipoise.serve.theirs import load_checkpoint

        model, theirs = model_of(manifest), load_checkpoint(folder, manifest)
    run = folder.resolve().parent.parent
    kept = read_kept(run / HF) or _kept_by_earlier_version(run)
    files = kept.files
    if theirs is not None and CONFIG not in files.contents:
        config = read_bytes(folder / CONFIG)
        files = ModelFiles({**files.contents, CONFIG: config}, str(folder))
    if TOKENIZER not in files.contents:
        remarks = (
            *remarks,
            f"No tokenizer for {folder}: its run's {RESOLVED} or its token cache is missing or "
            "damaged. Give one with --tokenizer.",
        )
    return TrainedModel(
        folder,
        model,
        state,
        files,
        manifest.step,
        manifest.context_tokens,
        kept.dtypes,
        (*remarks, *kept.remarks),
        theirs,
    )


def _kept_by_earlier_version(run: Path) -> KeptFiles:
    """The tokenizer of a run that kept no files, if its token cache is still there."""
    try:
        store = open_store(Path(read_resolved(run).corpus))
        return files_to_keep(None, store.tokenizer_file)
    except (SpecError, DataError):
        return KeptFiles(ModelFiles({}, str(run)), "", {}, ())
