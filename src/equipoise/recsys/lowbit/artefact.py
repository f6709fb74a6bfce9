"""A folder that holds a recommender in few bits, and all that serving it needs.

What it decides
    ``ranking.json`` says what each part is kept in, what that was measured to lose, and what the
    monitor saw; ``weights.safetensors`` has rows and weights as they are kept; ``columns.json`` is
    the run's. The first has a digest of itself and of the other two. The folder has its name only
    once it is whole. Format 1 had no digests.

Kept true (tests/unit/recsys/lowbit/test_request.py)
    What is read back scores as what was written, to the bit; a folder that is torn, or that has a
    file of another one, is refused.
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

import equipoise
from equipoise.base.digest import digest, digest_file
from equipoise.base.disk import disk_of, explain_refusal
from equipoise.base.durable import write_whole
from equipoise.base.errors import CheckpointError, ModelError
from equipoise.base.read import read_json, reason, require_file
from equipoise.numerics.rows import ROW_FORMATS
from equipoise.recsys.lowbit.layers import LayerForm, RoundedLinear, linears_of, swap_module
from equipoise.recsys.lowbit.parts import Forms
from equipoise.recsys.models.catalog import build_model
from equipoise.recsys.rank.coding import COLUMNS, Coding, read_coding, write_coding
from equipoise.recsys.rank.pooling import PooledTable
from equipoise.recsys.rank.ranker import Ranker, open_ranker
from equipoise.recsys.rank.scorer import Scorer
from equipoise.spec.names import LOW_BIT
from equipoise.spec.recommend import RankModelSpec
from equipoise.spec.tables.table import TableSpec

_FORMAT = 2
_WEIGHTS = "weights.safetensors"
_TABLE, _DENSE, _DIGEST = "table ", "dense ", "digest"


def write_artefact(
    target: Path,
    scorer: Scorer,
    forms: Forms,
    coding: Coding,
    model: RankModelSpec,
    facts: Mapping[str, Any],
) -> None:
    """Write a folder.

    Args:
        target: It must not exist.
        scorer: The model in few bits.
        forms: The format of each part.
        coding: Of the run's columns.
        model: Of the run.
        facts: ``name`` and ``step`` of the run, and whatever else ``inspect`` shall show.

    Raises:
        ModelError: it cannot be written.
    """
    unfinished = target.with_name(f".{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        _fill(unfinished, scorer, forms, coding, model, facts)
        unfinished.rename(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        why = f"{error}; {disk_of(target)}"  # safetensors has its own words for a full disk
        if isinstance(error, OSError):
            why = explain_refusal(error, target)
        raise unwritten(target, why) from error


def unwritten(target: Path, why: str) -> ModelError:
    """The error of a folder that cannot be made."""
    return ModelError(f"{target} cannot be written ({why}). Name a folder on another disk.")


def _fill(
    folder: Path,
    scorer: Scorer,
    forms: Forms,
    coding: Coding,
    model: RankModelSpec,
    facts: Mapping[str, Any],
) -> None:
    tensors = {f"{_TABLE}{each.table.name}": each.rows.contiguous() for each in scorer.tables}
    tensors |= {f"{_DENSE}{k}": t.contiguous() for k, t in scorer.dense.state_dict().items()}
    save_file(tensors, folder / _WEIGHTS)
    write_coding(folder, coding)
    written = {
        "format": _FORMAT,
        "version": equipoise.__version__,
        "created": int(time.time()),
        **facts,
        "model": dataclasses.asdict(model),
        "tables": [[t.table.name, t.table.rows, t.table.width] for t in scorer.tables],
        "forms": dict(forms),
        "weight_bytes": scorer.held_bytes,
        "files": {name: digest_file(folder / name) for name in (_WEIGHTS, COLUMNS)},
    }
    write_whole(folder / LOW_BIT, json.dumps(written | {_DIGEST: digest(written)}, indent=1))


def read_facts(folder: Path) -> dict[str, Any]:
    """What a folder says of itself.

    Raises:
        CheckpointError: it cannot be read, or is of a newer format.
    """
    file = folder / LOW_BIT
    try:
        facts = read_json(file)
        form = int(facts["format"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(file, error) from None
    if form > _FORMAT:
        raise CheckpointError(
            f"{file} is of format {form}, and this version reads {_FORMAT}. Update equipoise."
        )
    if form != 1 and facts.get(_DIGEST) != digest(
        {key: value for key, value in facts.items() if key != _DIGEST}
    ):
        raise _damaged(file, ValueError("its bytes have changed"))
    return dict(facts)


def read_artefact(folder: Path) -> Ranker:
    """The model of a folder.

    Raises:
        CheckpointError: a file is missing, damaged or of another folder, or the folder is of a
            newer format.
    """
    facts = read_facts(folder)
    file = folder / LOW_BIT
    for name, held in facts.get("files", {}).items():
        _require_bytes(folder / name, held)
    coding = read_coding(folder)
    try:
        model = TypeAdapter(RankModelSpec).validate_python(facts["model"])
        forms = {str(name): str(form) for name, form in facts["forms"].items()}
        specs = [
            TableSpec(str(n), int(rows), int(width), pooling=model.pooling)
            for n, rows, width in facts["tables"]
        ]
        name, step, created = str(facts["name"]), int(facts["step"]), int(facts["created"])
    except (KeyError, TypeError, ValueError, AttributeError, ValidationError) as error:
        raise _damaged(file, error) from None
    weights = folder / _WEIGHTS
    try:
        require_file(weights)
        tensors = load_file(weights)
        tables = []
        for spec in specs:
            kept = next((f for f in ROW_FORMATS if f == forms.get(spec.name)), None)
            tables.append(PooledTable(spec, tensors[f"{_TABLE}{spec.name}"], kept))
        dense = build_model(model, specs, len(coding.numbers), seed=0)
        _swap_layers(dense, forms)
        dense.load_state_dict(
            {k.removeprefix(_DENSE): t for k, t in tensors.items() if k.startswith(_DENSE)}
        )
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise _damaged(weights, error) from None
    return Ranker(
        name, coding, Scorer(tables, dense.eval()), step, created, form=describe_forms(forms)
    )


def open_any(folder: Path) -> Ranker:
    """A recommender's run, or a folder that ``write_artefact`` made.

    Raises:
        CheckpointError, SpecError: as ``open_ranker`` and ``read_artefact``.
    """
    return read_artefact(folder) if (folder / LOW_BIT).is_file() else open_ranker(folder)


def describe_forms(forms: Forms) -> str:
    """Formats and how many parts have them.

    >>> describe_forms({"user": "int8", "ad": "int8", "layer top.0": "fp32"})
    '2 int8, 1 fp32'
    """
    counted = {form: [*forms.values()].count(form) for form in forms.values()}
    ordered = sorted(counted, key=lambda form: -counted[form])
    return ", ".join(f"{counted[form]} {form}" for form in ordered) or "fp32"


def _swap_layers(dense: nn.Module, forms: Forms) -> None:
    """Put empty layers of few bits where the model has them."""
    for name, linear in linears_of(dense).items():
        form = forms.get(f"layer {name}", "fp32")
        if form != "fp32":
            kept: LayerForm = form  # type: ignore[assignment]
            sizes = linear.in_features, linear.out_features
            made = RoundedLinear(*sizes, kept, has_bias=linear.bias is not None)
            swap_module(dense, name, made)


def _require_bytes(file: Path, held: str) -> None:
    try:
        require_file(file)
        is_same = digest_file(file) == held
    except OSError as error:
        raise _damaged(file, error) from None
    if not is_same:
        raise _damaged(file, ValueError("its bytes have changed, or it is another folder's"))


def _damaged(file: Path, error: Exception) -> CheckpointError:
    is_said = isinstance(error, FileNotFoundError | ValueError) and not isinstance(
        error, ValidationError
    )
    why = reason(error) if is_said else "it is damaged"
    return CheckpointError(
        f"{file} cannot be read: {why}. Convert the run again: equipoise convert RUN TO --budget "
        "0.001."
    )
