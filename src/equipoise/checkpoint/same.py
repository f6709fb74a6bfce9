"""Refuse a checkpoint whose tensors are not those of the run that loads it, before one is read.

Why
    Torch converts a dtype silently, and passes over a tensor that nobody asks for. Either makes
    another model of it.

Kept true (tests/multi/checkpoint/test_same.py)
    A tensor that is missing, left over, of another shape or dtype is named, and no byte of the
    state changes; the order of tensors means nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.index import Index
from equipoise.comm.group import Ranks

_Kinds = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of tensors by name."""


class OtherTensorsError(CheckpointError):
    """A sound checkpoint of other tensors than those of the run."""


def require_same_tensors(
    folder: Path, index: Index, state: Mapping[str, Any], ranks: Ranks | None
) -> None:
    """Compare a checkpoint's tensors with the state of all ranks; each of them calls this.

    Args:
        folder: The checkpoint.
        index: Its tensors.
        state: This rank's, as ``places.live_state`` returns it.
        ranks: All ranks; one alone unless given.

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
    sentence = _difference(held, wanted)
    if sentence:
        raise OtherTensorsError(
            f"{folder} holds another model: {sentence}. Give run.toml the sizes of the checkpoint, "
            f"or train into another folder with --out."
        )


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
