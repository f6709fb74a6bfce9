"""Save and load: sharded by torch's distributed checkpoint, whole or absent.

What it decides
    Every rank writes its shards into ``.saving-000250``; when all are written, rank 0 writes the
    manifest with digests, flushes everything to disk and renames the folder ``step-000250``. A
    kill, a full disk or a lost rank at any moment leaves the older checkpoints intact.

    Another layout may load: shards are addressed by tensor name and offset, and a pipeline stage
    writes and reads its own names. Tensors come from the checkpoint, the optimizer's settings from
    the run that loads it.

    Checkpoints are dropped only from this step downwards: a later one was skipped as torn, and
    counting it would drop a whole one instead.

Kept true (tests/multi/train/test_checkpoint.py)
    Saved on 2 ranks and loaded on 1 or 3, every tensor is bitwise the same; a failed save leaves
    the older checkpoints untouched.
"""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from equipoise.base.disk import disk_of
from equipoise.base.durable import sync
from equipoise.base.errors import CheckpointError
from equipoise.base.units import format_bytes
from equipoise.checkpoint.manifest import (
    Manifest,
    describe_files,
    drop_older,
    find_checkpoints,
    folder_name,
    remove,
    write_manifest,
)
from equipoise.checkpoint.shards import ShardReader, ShardWriter
from equipoise.comm.group import Ranks


def _state(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Tensors of both, and the optimizer's groups: settings, which are not saved."""
    state: dict[str, Any] = {
        "model": get_model_state_dict(module),
        "optimizer": get_optimizer_state_dict(module, optimizer),
    }
    return state, state["optimizer"].pop("param_groups")


def _root_cause(error: BaseException) -> str:
    """The message of the failure inside torch's own wrapping."""
    failures = getattr(error, "failures", None)
    if failures:
        inner = next(iter(failures.values()))
        error = inner[0] if isinstance(inner, tuple) else inner
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


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
    partial = root / f".saving-{manifest.step:06d}"
    final = root / folder_name(manifest.step)
    fault = ""
    try:
        if ranks.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
    except OSError as error:
        fault = str(error)
    fault = _agree(ranks, fault)
    if not fault:
        try:
            # torch logs a traceback of its own for what is raised here in one sentence.
            logging.getLogger("torch.distributed.checkpoint").setLevel(logging.CRITICAL)
            state, _ = _state(module, optimizer)
            state_dict_saver.save(state, storage_writer=ShardWriter(partial))
            if ranks.rank == 0:
                for name, text in (texts or {}).items():
                    (partial / name).write_text(text)
                described = describe_files(partial)
                whole = {f: getattr(manifest, f) for f in Manifest.__slots__} | {"files": described}
                write_manifest(partial, Manifest(**whole))
                remove(final)
                partial.rename(final)
                sync(root)
        except (Exception, CheckpointException) as error:  # the latter is not an Exception
            fault = _root_cause(error)  # whatever stopped the write, the run can go on without it
        fault = _agree(ranks, fault)
    if fault:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        ranks.barrier()
        raise CheckpointError(_explain(root, manifest.step, fault, module))
    if ranks.rank == 0:
        drop_older(root, manifest.step, keep)
        for stale in root.glob(".saving-*"):
            shutil.rmtree(stale, ignore_errors=True)
    return final


def stored_bytes(folder: Path) -> int:
    """Bytes that a checkpoint's files take on disk; 0 if it cannot be read."""
    try:
        return sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    except OSError:
        return 0


def _explain(root: Path, step: int, fault: str, module: nn.Module) -> str:
    needed = 3 * sum(p.numel() * p.element_size() for p in module.parameters())  # and 2 moments
    there = list(find_checkpoints(root))
    needed = max([needed, *map(stored_bytes, there[:1])])
    kept = ", ".join(path.name for path in there) or "none"
    return (
        f"The checkpoint of step {step} could not be written to {root} ({fault}; it needs "
        f"{format_bytes(needed)}, and {disk_of(root)}). Checkpoints kept: {kept}. Free some "
        f"space, or lower checkpoint.keep."
    )


def _agree(ranks: Ranks, fault: str) -> str:
    return next((each for each in ranks.gather_objects(fault) if each), "")


def load(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill a sharded module and its optimizer from a verified checkpoint, in place.

    Raises:
        CheckpointError: it could not be read.
    """
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    state, groups = _state(module, optimizer)
    reader = ShardReader(folder)
    try:
        state_dict_loader.load(state, storage_reader=reader)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{folder} could not be loaded ({_root_cause(error)}).") from error
    state["optimizer"]["param_groups"] = groups
    set_model_state_dict(module, state["model"])
    set_optimizer_state_dict(module, optimizer, state["optimizer"])
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
