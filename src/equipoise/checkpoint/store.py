"""Save a model and its optimizer at once, and load them into any layout.

What it decides
    Another layout may load: shards are addressed by tensor name and offset, and a pipeline stage
    writes and reads its own names. Tensors come from the checkpoint, the optimizer's settings from
    the run that loads it.

    A run may resume with other weights frozen than before. Weights that are newly trained have no
    moments in the checkpoint and begin as at a first step; moments of newly frozen ones are not
    read.

    A rank reads the bytes that it needs. Every byte is verified all the same, divided over the
    ranks (``checkpoint.reading``). Damage anywhere is an error on all ranks, and so is a tensor
    that is missing, left over, or of another shape or dtype.

Kept true (tests/multi/train/test_checkpoint.py)
    Saved on 2 ranks and loaded on 1 or 3, every tensor is bitwise the same; a failed save leaves
    the older checkpoints untouched.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    set_model_state_dict,
    set_optimizer_state_dict,
)

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.background import Saver
from equipoise.checkpoint.manifest import Manifest, folder_name
from equipoise.checkpoint.places import live_state
from equipoise.checkpoint.reading import ReadCounts
from equipoise.checkpoint.same import require_same_tensors, weights_with_moments
from equipoise.checkpoint.shards import ShardReader
from equipoise.comm.group import Ranks


def save(
    root: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    manifest: Manifest,
    *,
    keep: int,
    texts: Mapping[str, str] | None = None,
) -> Path:
    """Write ``root/step-NNNNNN`` from all ranks, then drop all but the ``keep`` newest.

    Args:
        root: Folder of the run's checkpoints.
        module: Sharded weights.
        optimizer: Its moments.
        ranks: All ranks; each of them calls this.
        manifest: The checkpoint's description; its files are filled in.
        keep: Number of checkpoints to keep.
        texts: Further small files, by name.

    Raises:
        CheckpointError: on every rank, if any could not write; older checkpoints remain.
    """
    with Saver(root, module, optimizer, ranks, keep=keep) as saver:
        saver.begin(manifest, texts or {})
        saver.settle()
    return root / folder_name(manifest.step)


def load(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    manifest: Manifest | None = None,
    ranks: Ranks | None = None,
    other_moments: bool = False,
) -> ReadCounts:
    """Fill a sharded module and its optimizer from a checkpoint, in place.

    Args:
        folder: The checkpoint.
        module: Sharded weights.
        optimizer: Its moments.
        manifest: As ``open_manifest`` returned it, to verify every byte; without one all of them
            were verified before.
        ranks: All ranks; each of them calls this. One alone unless given.
        other_moments: Whether it may have moments of other weights than those that are trained.

    Returns:
        What this rank has read.

    Raises:
        OtherTensorsError: on every rank, if it holds other tensors; nothing has been filled.
        CheckpointError: on every rank, if it could not be read, or is torn. Tensors may have been
            filled in part.
    """
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    state, groups = live_state(module, optimizer)
    reader = _open(folder, manifest, ranks)
    require_same_tensors(folder, reader.index, state, ranks, other_moments=other_moments)
    moments = state["optimizer"]["state"]
    new = moments.keys() - weights_with_moments(reader.index) if other_moments else set()
    fresh = {name: moments.pop(name) for name in new}
    try:
        state_dict_loader.load(state, storage_reader=reader)
        reader.settle()
    except (Exception, CheckpointException) as error:  # the latter is not an Exception
        cause = _root_cause(error)
        if isinstance(cause, CheckpointError):
            raise CheckpointError(str(cause)) from error
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        raise CheckpointError(f"{folder} could not be loaded ({lines[-1]}).") from error
    finally:
        reader.close()
    for each in fresh.values():
        for value in each.values():
            value.zero_()
    moments |= fresh
    state["optimizer"]["param_groups"] = groups
    set_model_state_dict(module, state["model"])
    set_optimizer_state_dict(module, optimizer, state["optimizer"])
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    return reader.counts


def _open(folder: Path, manifest: Manifest | None, ranks: Ranks | None) -> ShardReader:
    """Read the index; where one rank cannot, none waits for it.

    Raises:
        CheckpointError: on every rank.
    """
    reader, fault = None, ""
    try:
        reader = ShardReader(folder, manifest, ranks)
    except CheckpointError as error:
        fault = str(error)
    except OSError as error:
        fault = f"{folder} could not be loaded ({error.strerror}: {error.filename})."
    faults = [fault] if ranks is None else ranks.gather_objects(fault)
    for each in faults:
        if each:
            raise CheckpointError(each)
    assert reader is not None  # noqa: S101
    return reader


def _root_cause(error: BaseException) -> BaseException:
    """The failure inside torch's own wrapping, of the first rank that had one."""
    failures = getattr(error, "failures", None)
    if failures:
        inner = next(iter(failures.values()))
        error = inner[0] if isinstance(inner, tuple) else inner
    while error.__cause__ is not None and not isinstance(error, CheckpointError):
        error = error.__cause__
    return error
