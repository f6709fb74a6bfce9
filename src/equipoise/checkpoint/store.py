"""Save a model and its optimizer at once, and load them into any layout.

What it decides
    Another layout may load: shards are addressed by tensor name and offset, and a pipeline stage
    writes and reads its own names. Tensors come from the checkpoint, the optimizer's settings from
    the run that loads it.

    Every byte is verified: what a rank loads as it is read, what no rank loads after that, divided
    over the ranks. Damage anywhere is an error on all ranks.

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
from equipoise.checkpoint.manifest import Manifest, folder_name, verify_rest
from equipoise.checkpoint.places import live_state
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
) -> None:
    """Fill a sharded module and its optimizer from a checkpoint, in place.

    Args:
        folder: The checkpoint.
        module: Sharded weights.
        optimizer: Its moments.
        manifest: As ``open_manifest`` returned it, to verify every byte; without one all of them
            were verified before.
        ranks: All ranks, with a manifest; each of them calls this.

    Raises:
        CheckpointError: on every rank, if it could not be read, or is torn. Tensors may have been
            filled in part.
    """
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    state, groups = live_state(module, optimizer)
    reader = ShardReader(folder, manifest)
    try:
        state_dict_loader.load(state, storage_reader=reader)
    except (Exception, CheckpointException) as error:  # the latter is not an Exception
        cause = _root_cause(error)
        if isinstance(cause, CheckpointError):
            raise CheckpointError(str(cause)) from error
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        raise CheckpointError(f"{folder} could not be loaded ({lines[-1]}).") from error
    finally:
        reader.close()
    if manifest is not None and ranks is not None:
        _verify_rest(folder, manifest, reader, ranks)
    state["optimizer"]["param_groups"] = groups
    set_model_state_dict(module, state["model"])
    set_optimizer_state_dict(module, optimizer, state["optimizer"])
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def _verify_rest(folder: Path, manifest: Manifest, reader: ShardReader, ranks: Ranks) -> None:
    """Verify what no rank has read, shards divided over ranks."""
    seen, fault = ranks.gather_objects(reader.verified), ""
    for number, name in enumerate(sorted(manifest.blocks)):
        if number % ranks.world == ranks.rank and not fault:
            verified = {block for each in seen for block in each.get(name, ())}
            try:
                verify_rest(folder, manifest, reader.index, name, verified)
            except CheckpointError as error:
                fault = str(error)
    faults = [each for each in ranks.gather_objects(fault) if each]
    if faults:
        raise CheckpointError(faults[0])


def _root_cause(error: BaseException) -> BaseException:
    """The failure inside torch's own wrapping, of the first rank that had one."""
    failures = getattr(error, "failures", None)
    if failures:
        inner = next(iter(failures.values()))
        error = inner[0] if isinstance(inner, tuple) else inner
    while error.__cause__ is not None and not isinstance(error, CheckpointError):
        error = error.__cause__
    return error
