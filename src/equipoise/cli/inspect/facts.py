"""What a file or a folder of a run holds, read and verified."""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.base.errors import CheckpointError, DataError, ModelError, SpecError
from equipoise.base.read import read_json, reason, require_file
from equipoise.base.shown import counted
from equipoise.checkpoint.manifest import MANIFEST, Manifest, find_checkpoints, read_manifest
from equipoise.cli.console import make_progress
from equipoise.cli.inspect.recommend import OK, Facts, describe_checkpoint, describe_run
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.names import CHECKPOINTS, LOW_BIT, RECOMMEND, RESOLVED, is_recommender
from equipoise.spec.plan import Stages

if TYPE_CHECKING:
    from equipoise.observe.run_record import Evaluations, RunRecord

_JOURNAL = "journal"


def read_facts(path: Path, silent: bool) -> Facts:
    """The facts of ``path`` as plain data: "kind", "path", sizes in bytes, "state".

    Raises:
        SpecError: nothing is there, or nothing that equipoise reads.
    """
    return _describer(path)(path, silent)


def is_torn(facts: Facts) -> bool:
    """Whether a checkpoint among the facts is not whole."""
    checked = [facts, *facts.get("checkpoints", [])]
    return any(each["kind"] == "checkpoint" and each["state"] != OK for each in checked)


def _describer(path: Path) -> Callable[[Path, bool], Facts]:
    if not path.exists():
        raise SpecError(f"No such file or folder: {path}. Give one that equipoise reads.")
    if path.is_file():
        if path.suffix == ".gguf":
            return _gguf
        if path.suffix == ".json":
            return _tokenizer
    elif (path / LOW_BIT).is_file():
        return _low_bit
    elif is_recommender(path):
        return _recommender
    elif path.name.startswith("step-") and _is_recommenders(path):
        return _tables
    elif (path / MANIFEST).exists() or path.name.startswith("step-"):
        return _checkpoint
    elif (path / RESOLVED).exists() or (path / _JOURNAL).is_dir() or (path / CHECKPOINTS).is_dir():
        return _run
    elif (path / "config.json").exists():
        return _hugging_face
    elif (path / "meta.json").exists():
        return _token_cache
    raise SpecError(
        f"{path} is nothing that equipoise knows. Give a run, a checkpoint, a Hugging Face "
        "folder, a .gguf file, a token cache, or a tokenizer.json."
    )


def _low_bit(folder: Path, silent: bool) -> Facts:
    """A recommender in few bits: its formats, and what they were measured to lose."""
    del silent
    from equipoise.recsys.lowbit.artefact import describe_forms, read_artefact, read_facts

    facts, ranker = read_facts(folder), read_artefact(folder)
    return {
        "kind": "recommender in few bits",
        "path": str(folder),
        "name": ranker.name,
        "from": facts.get("from"),
        "step": ranker.step,
        "written_by": f"equipoise {facts.get('version')}",
        "columns": ", ".join(ranker.columns),
        "forms": describe_forms(facts["forms"]),
        "weight_bytes": ranker.scorer.held_bytes,
        "fp32_bytes": facts.get("bytes", {}).get("fp32"),
        "budget": facts.get("budget"),
        "validation_loss": facts.get("loss", {}).get("loss"),
        "test_loss": facts.get("held_out", {}).get("loss"),
        "windows": len(facts.get("windows", [])),
        "drift_fired": sum(bool(each["fired"]) for each in facts.get("windows", [])),
        "size_bytes": _bytes_of(folder),
    }


def _recommender(folder: Path, silent: bool) -> Facts:
    facts = describe_run(folder)
    checkpoints = _verify_all(folder, describe_checkpoint, silent)
    return facts | {"checkpoints": checkpoints, "size_bytes": _bytes_of(folder)}


def _is_recommenders(checkpoint: Path) -> bool:
    """Whether a checkpoint is a recommender's, by its manifest or by the run around it."""
    return (checkpoint / RECOMMEND).exists() or is_recommender(checkpoint.absolute().parent.parent)


def _tables(folder: Path, silent: bool) -> Facts:
    del silent
    return describe_checkpoint(folder) | {"size_bytes": _bytes_of(folder)}


def _sizes(model: ModelSpec) -> Facts:
    """The sizes of a model that are not its defaults, as plain data."""
    return _no_defaults(dataclasses.asdict(model))


def _no_defaults(model: Facts) -> Facts:
    defaults = {each.name: each.default for each in dataclasses.fields(ModelSpec)}
    return {key: value for key, value in model.items() if value != defaults.get(key)}


def _bytes_of(folder: Path) -> int:
    """Bytes of all files; of a run that trains, of those that are still there."""
    size_bytes = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size_bytes += Path(place, name).stat().st_size
    return size_bytes


def _read(folder: Path) -> tuple[Manifest | None, str]:
    from equipoise.checkpoint.export import require_weights

    try:
        manifest = read_manifest(folder)
        require_weights(folder, manifest)
        return manifest, OK
    except CheckpointError as error:
        return None, str(error)


def _checkpoint(folder: Path, silent: bool) -> Facts:
    progress = make_progress(silent)
    progress.start(f"verify {folder.name}", 1)
    try:
        manifest, state = _read(folder)
        progress.advance(1)
    finally:
        progress.finish()
    return _checkpoint_facts(folder, manifest, state)


def _checkpoint_facts(folder: Path, manifest: Manifest | None, state: str) -> Facts:
    facts: Facts = {"kind": "checkpoint", "path": str(folder), "state": state}
    if manifest is not None:
        from equipoise.checkpoint.export import model_of

        model = model_of(manifest)
        facts |= {
            "params": model.params,
            "step": manifest.step,
            "tokens_seen": manifest.position_tokens,
            "ranks": manifest.world,
            "written_by": f"equipoise {manifest.version}",
            "context_tokens": manifest.context_tokens,
            "seed": manifest.seed,
            "corpus_digest": manifest.corpus_digest,
            **_trained(manifest),
            "files": len(manifest.files),
            "model": _sizes(model),
        }
    return facts | {"size_bytes": _bytes_of(folder)}


def _trained(manifest: Manifest) -> Facts:
    """Adapters and frozen weights of a checkpoint; empty where all weights were trained."""
    rank, frozen = manifest.run.get("lora.rank"), manifest.run.get("train.freeze")
    return ({"lora_rank": rank} if rank else {}) | ({"frozen": frozen} if frozen else {})


def _run(folder: Path, silent: bool) -> Facts:
    from equipoise.observe.reader import read_sides

    facts: Facts = {"kind": "run", "path": str(folder)}
    try:
        record, *others = read_sides(folder)
    except DataError as error:
        facts |= {"steps": 0, "journal": str(error)}
    else:
        steps = len(record.step)
        facts |= {
            "steps": int(record.step[-1]) if steps else 0,
            "steps_wanted": record.start.spec.get("train", {}).get("steps"),
            "loss": _known(record.loss[-1]) if steps else None,
            **_held_out(record.evaluations),
            "tokens_seen": _tokens_seen(record),
            "sessions": len(record.resumed_steps),
            "ranks": record.ranks,
            "policy": ", ".join(each.start.policy for each in (record, *others)),
            **_stages(record.start.stages),
            "stopped": record.stop.reason if record.stop else None,
            "faults": [fault.message for fault in record.faults],
            "journal": _journal_state((record, *others)),
            "model": _no_defaults(dict(record.start.model)),
        }
    checkpoints = _verify_all(folder, lambda each: _checkpoint_facts(each, *_read(each)), silent)
    return facts | {"checkpoints": checkpoints, "size_bytes": _bytes_of(folder)}


def _verify_all(folder: Path, describe: Callable[[Path], Facts], silent: bool) -> list[Facts]:
    """The facts of each checkpoint of a run."""
    folders = list(find_checkpoints(folder / CHECKPOINTS))
    progress = make_progress(silent or not folders)
    progress.start(f"verify {counted(len(folders), 'checkpoint')}", len(folders))
    checkpoints = []
    try:
        for each in folders:
            facts = {"size_bytes": _bytes_of(each)} | describe(each)
            if os.path.lexists(each):  # a run that trains drops its older ones
                checkpoints.append(facts)
            progress.advance(1)
    finally:
        progress.finish()
    return checkpoints


def _journal_state(sides: Sequence["RunRecord"]) -> str:
    """What is wrong with the journals of a run's sides, or that nothing is."""
    torn = sum(side.torn_lines for side in sides)
    faults = [side.missing_sentence for side in sides if side.missing_ranks]
    faults += [f"{torn:,} torn lines"] * bool(torn)
    return " ".join(faults) or OK


def _held_out(evaluations: "Evaluations") -> Facts:
    """The last held-out loss; empty if nothing was evaluated."""
    if not evaluations.step.size:
        return {}
    step, loss = int(evaluations.step[-1]), _known(evaluations.loss[-1])
    return {"held_out_loss": loss, "evaluated_step": step}


def _known(value: float) -> float | None:
    """A number of a journal; None where it lacks it."""
    return None if math.isnan(value) else float(value)


def _tokens_seen(record: "RunRecord") -> int | None:
    seen = _known(record.tokens_seen[-1]) if len(record.step) else 0.0
    return None if seen is None else int(seen)


def _stages(stages: Mapping[str, Any]) -> Facts:
    """The stages of a run's pipeline; empty without one."""
    if not stages:
        return {}
    return {"stages": str(Stages(tuple(stages["edges"]), tuple(stages["ranks"])))}


def _hugging_face(folder: Path, _silent: bool) -> Facts:
    from safetensors import SafetensorError, safe_open

    from equipoise.nn.hf.weights import TIED_HEAD, names_to_read, weight_files
    from equipoise.spec.model.hf_config import model_from_hf_config

    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise SpecError(f"{folder / 'config.json'} cannot be read: {reason(error)}.") from None
    model = model_from_hf_config(config)
    params, tensors, state = 0, 0, OK
    dtypes: Counter[str] = Counter()
    files: dict[Path, list[str] | None] = {}
    try:
        files = weight_files(folder)
    except ModelError as error:
        state = str(error)
    for file, listed in files.items():
        try:
            require_file(file)
            with safe_open(file, framework="np") as opened:
                for name in names_to_read(file, opened.keys(), listed):
                    part = opened.get_slice(name)
                    if not (model.tied and name == TIED_HEAD):  # some writers store it twice
                        params += math.prod(part.get_shape())
                    tensors += 1
                    dtypes[part.get_dtype()] += 1
        except (OSError, SafetensorError) as error:
            state = f"{file.name} cannot be read ({reason(error)})"
        except ModelError as error:
            state = str(error)
    if state == OK and params != model.params:
        state = f"config.json calls for {model.params:,} parameters, the files hold {params:,}"
    return {
        "kind": "Hugging Face folder",
        "path": str(folder),
        "state": state,
        "model_type": config["model_type"],
        "params": model.params,
        "tensors": tensors,
        "dtypes": dict(dtypes),
        "files": len(files),
        **_beside(folder),
        "model": _sizes(model),
        "size_bytes": _bytes_of(folder),
    }


def _beside(folder: Path) -> Facts:
    """What stands beside the weights: tokenizer, chat template, how it generates."""
    from equipoise.nn.hf.files import CONFIG, GENERATION, TOKENIZER, read_files
    from equipoise.serve.tokenizer import read_settings

    files = read_files(folder)
    settings = read_settings(files)
    templates = sorted(settings.templates)
    return {
        "tokenizer": TOKENIZER in files.contents,
        "special_tokens": settings.special_tokens,
        "chat_template": ", ".join(templates) if len(templates) > 1 else bool(templates),
        "generation_config": GENERATION in files.contents,
        "end_ids": list(files.end_ids),
        "positions": files.table(CONFIG).get("max_position_embeddings"),
    }


def _gguf(file: Path, _silent: bool) -> Facts:
    from equipoise.nn.hf.gguf import read_gguf_header

    header = read_gguf_header(file)
    return {
        "kind": "GGUF",
        "path": str(file),
        "name": header.name,
        "params": header.model.params,
        "tensors": header.tensors,
        "quantisations": header.quantisations,
        "context_tokens": header.context_tokens,
        "chat_template": "chat_template" in header.tokenizer_config,
        "end_ids": header.end_ids,
        "model": _sizes(header.model),
        "size_bytes": file.stat().st_size,
    }


def _token_cache(folder: Path, _silent: bool) -> Facts:
    import numpy as np

    from equipoise.data.cache.store import open_store

    store = open_store(folder)
    store.verify()
    return {
        "kind": "token cache",
        "path": str(folder),
        "state": OK,
        "source": store.source_name,
        "source_kind": store.source_kind,
        "documents": store.documents,
        "tokens": int(store.offsets[-1]),
        "median_document_tokens": int(np.median(store.doc_tokens)) if store.documents else 0,
        "longest_document_tokens": int(store.doc_tokens.max(initial=0)),
        "empty_documents": store.empty_documents,
        "undecodable_documents": store.undecodable_documents,
        "vocab": store.vocab,
        "end": store.end,
        "digest": store.digest,
        "size_bytes": _bytes_of(folder),
    }


def _tokenizer(file: Path, _silent: bool) -> Facts:
    from equipoise.data.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(file)
    kind = read_json(file)["model"].get("type", "unknown")
    return {
        "kind": "tokenizer",
        "path": str(file),
        "model": {"type": kind},
        "vocab": tokenizer.vocab,
        "end": tokenizer.end,
        "end_token": tokenizer.core.id_to_token(tokenizer.end),
        "digest": tokenizer.digest,
        "size_bytes": file.stat().st_size,
    }
