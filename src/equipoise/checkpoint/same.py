"""Refuse a checkpoint that is not the run's: another model, corpus, order, or other tensors.

Why
    Torch converts a dtype silently, and passes over a tensor that nobody asks for. Either makes
    another model of it.

Kept true (tests/multi/checkpoint/test_same.py, tests/unit/checkpoint/test_manifest.py)
    What differs is named with both sides. A tensor that is missing, left over, of another shape or
    dtype is named, and no byte of the state changes; the order of tensors means nothing.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.index import Index
from equipoise.checkpoint.manifest import OWN_ENGINE, Manifest
from equipoise.comm.group import Ranks
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.resume import TRAINED, describe_changes, resume_facts
from equipoise.spec.run.spec import RunSpec

_Kinds = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of tensors by name."""


class OtherTensorsError(CheckpointError):
    """A sound checkpoint of other tensors than those of the run."""


_MOMENTS = "optimizer.state."


def weights_with_moments(tensors: Iterable[str]) -> set[str]:
    """The weights of which there are moments among a checkpoint's tensors, by their names."""
    return {_weight(name) for name in tensors} - {""}


def require_same_tensors(
    folder: Path,
    index: Index,
    state: Mapping[str, Any],
    ranks: Ranks | None,
    *,
    other_moments: bool = False,
) -> None:
    """Compare a checkpoint's tensors with the state of all ranks; each of them calls this.

    Args:
        folder: The checkpoint.
        index: Its tensors.
        state: This rank's, as ``places.live_state`` returns it.
        ranks: All ranks; one alone unless given.
        other_moments: Whether each side may have moments of weights of which the other has none.

    Raises:
        OtherTensorsError: names the first tensor that differs, and both sides.
    """
    own: _Kinds = {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in flatten_state_dict(dict(state))[0].items()
        if isinstance(tensor, Tensor)
    }
    wanted = own if ranks is None else _union(ranks.gather_objects(own))
    held: _Kinds = {name: (stored.dtype, stored.shape) for name, stored in index.items()}
    if other_moments:
        mine, theirs = weights_with_moments(wanted), weights_with_moments(held)
        wanted = {name: kind for name, kind in wanted.items() if _weight(name) not in mine - theirs}
        held = {name: kind for name, kind in held.items() if _weight(name) not in theirs - mine}
    sentence = _difference(held, wanted)
    if sentence:
        raise OtherTensorsError(
            f"{folder} holds another model: {sentence}. Give run.toml the sizes of the checkpoint, "
            f"or train into another folder with --out."
        )


def _weight(name: str) -> str:
    """The weight that a moment is of; empty for any other tensor."""
    return name.removeprefix(_MOMENTS).rpartition(".")[0] if name.startswith(_MOMENTS) else ""


def _union(rows: list[_Kinds]) -> _Kinds:
    return {name: kind for row in rows for name, kind in row.items()}


def _difference(held: _Kinds, wanted: _Kinds) -> str:
    """What differs between a checkpoint and a run; empty if nothing does."""
    missing = [name for name in wanted if name not in held]
    extra = [name for name in held if name not in wanted]
    if missing:
        return f"it lacks {_named(missing)}"
    if extra:
        return f"it has {_named(extra)}, which this run does not have"
    for name, (dtype, shape) in wanted.items():
        if held[name] != (dtype, shape):
            held_dtype, held_shape = held[name]
            return (
                f"its {name} is {held_dtype} {list(held_shape)} (this run: {dtype} {list(shape)})"
            )
    return ""


def _named(names: list[str]) -> str:
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return f"{names[0]}{more}"


def require_text_alone(manifest: Manifest, folder: Path) -> None:
    """Refuse a model that reads images or sound, where only text is read.

    Raises:
        CheckpointError: names the sections of its run.
    """
    names = [f"[{name}]" for name in ("vision", "audio") if manifest.run.get(f"{name}.layers")]
    if names:
        raise CheckpointError(
            f"{folder} is of a model that reads images or sound ({' and '.join(names)} of its "
            "run). equipoise train resumes it in any layout; nothing else here reads it yet."
        )


def require_same(
    manifest: Manifest,
    folder: Path,
    *,
    model: ModelSpec,
    corpus_digest: str,
    seed: int,
    run: Mapping[str, Any] | None = None,
    engine: str = OWN_ENGINE,
) -> None:
    """Refuse to continue a checkpoint of another model, corpus or order of documents.

    With the ``resume_facts`` of the run, also one of other trained weights.

    Raises:
        CheckpointError: names each size that differs.
    """
    if manifest.engine != engine:
        raise CheckpointError(
            f'{folder} was trained with model.engine = "{manifest.engine}", whose weights have '
            f'other names than those of "{engine}". Set model.engine = "{manifest.engine}", or '
            f"train into another folder with --out."
        )
    # A size that an older version did not know has the value of all its models.
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(ModelSpec)
        if field.default is not dataclasses.MISSING
    }
    saved, wanted = defaults | manifest.model, json.loads(json.dumps(dataclasses.asdict(model)))
    keys = [key for key in {**wanted, **saved} if wanted.get(key) != saved.get(key)]
    if keys:
        differing = ", ".join(
            f"{key} {saved.get(key)} (this run: {wanted.get(key)})" for key in keys
        )
        raise CheckpointError(
            f"{folder} holds another model: {differing}. Give run.toml the sizes of the "
            f"checkpoint, or train into another folder with --out."
        )
    changed = {name: value for name, value in (run or {}).items() if name in TRAINED}
    defaults = resume_facts(RunSpec())
    before = {name: manifest.run.get(name, defaults[name]) for name in changed}
    if changes := describe_changes(before, changed):
        raise CheckpointError(
            f"{folder} has trained other weights: {changes}. Give run.toml the keys of the "
            f"checkpoint, or train into another folder with --out."
        )
    if manifest.corpus_digest != corpus_digest:
        raise CheckpointError(
            f"{folder} was trained on another corpus or tokenizer (digest "
            f"{manifest.corpus_digest[:8]}; this run's is {corpus_digest[:8]}). Restore the "
            f"[data] of that run, or train into another folder with --out."
        )
    if manifest.seed != seed:
        raise CheckpointError(
            f"{folder} has read the corpus in the order of train.seed = {manifest.seed}, but this "
            f"run's is {seed}: documents would come twice or never. Set train.seed = "
            f"{manifest.seed}, or train into another folder with --out."
        )
