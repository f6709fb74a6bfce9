"""Checkpoints of a recommender: regions of tables, which any plan and number of ranks reads.

What it decides
    A rank writes its shards, each with the rows and columns that it is; data-parallel tables and
    the dense part are rank 0's, a tower's module that of one rank of its host. Each rank flushes
    its files and reads them back; the folder has its name only once all have, and what one cannot
    write, all hear of. Older checkpoints are dropped while two are left of which every byte has
    been verified. A rank that loads takes from each file the region that it holds.

Kept true (tests/multi/recsys/test_train.py, tests/multi/recsys/test_torn.py)
    A checkpoint of one plan goes on under another, on another number of ranks, as if nothing had
    happened; a folder that was not finished is not read.
"""

import io
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import nn

from equipoise.base.digest import digest_file
from equipoise.base.disk import disk_of
from equipoise.base.durable import sync
from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.manifest import find_checkpoints, folder_name
from equipoise.recsys.embedding import ShardedTables
from equipoise.recsys.shard import TableShard
from equipoise.recsys.whole import (
    MANIFEST,
    find_damage,
    gather,
    read_facts,
    seal,
    step_of,
    stored_files,
)
from equipoise.spec.names import CHECKPOINTS

_KEEP = 2
DENSE = "dense.pt"
"""The dense part and its optimizer, in a checkpoint."""

_Done = TypeVar("_Done")


@dataclass(frozen=True, slots=True)
class RankSaved:
    """Where a run stood."""

    step: int
    losses: list[float]
    best: Mapping[str, Any] | None


def save(
    folder: Path,
    tables: ShardedTables,
    dense: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: RankSaved,
    run: Mapping[str, Any],
    verified: set[Path],
) -> Path:
    """Write a checkpoint; all ranks call it together.

    Args:
        folder: The run's.
        tables: This rank's shards.
        dense: The dense part.
        optimizer: Its moments.
        saved: Where the run stands.
        run: Whose checkpoint it is (``same.describe_run``).
        verified: Checkpoints of which every byte is known to be right; this one is added.

    Returns:
        Its folder, ``checkpoint/step-000123``.

    Raises:
        CheckpointError: on every rank, if one of them could not write; older checkpoints are kept.
    """
    exchange = tables.exchange
    root = folder / CHECKPOINTS
    final = root / folder_name(saved.step)
    unfinished = root / f".{final.name}"

    def begin() -> None:
        if exchange.rank == 0:
            _remove(unfinished)
            unfinished.mkdir(parents=True)

    def write() -> dict[str, tuple[int, str]]:
        files = {f"rank-{exchange.rank:05d}.safetensors": _arrays(tables)}
        states: dict[str, Any] = {f"{name}.pt": part for name, part in tables.parts().items()}
        if exchange.rank == 0:
            states[DENSE] = {"dense": dense.state_dict(), "optimizer": optimizer.state_dict()}
        for name, arrays in files.items():
            save_file(arrays, unfinished / name)
        for name, state in states.items():
            data = io.BytesIO()
            torch.save(state, data)
            (unfinished / name).write_bytes(data.getbuffer())
        return {name: _flushed(unfinished / name) for name in (*files, *states)}

    def publish() -> None:
        if exchange.rank:
            return
        facts = (
            asdict(saved)
            | dict(run)
            | {
                "optimizer": tables.optimizer.name,
                "number": tables.number,
                "ranks": exchange.ranks,
                "parts": tables.part_names(),
                "tables": {
                    p.table.name: [p.table.rows, p.table.width] for p in tables.plan.placements
                },
                "kinds": {p.table.name: p.kind for p in tables.plan.placements},
            }
        )
        files = {name: held for row in written for name, held in row.items()}
        (unfinished / MANIFEST).write_text(seal(facts, files), encoding="utf-8")
        sync(unfinished / MANIFEST)
        sync(unfinished)
        _remove(final)
        unfinished.rename(final)
        sync(root)
        verified.add(final)
        _drop_older(root, saved.step, verified)

    written: list[dict[str, tuple[int, str]]] = []
    try:
        _together(exchange.ranks, begin, final)
        written = _together(exchange.ranks, write, final)
        _together(exchange.ranks, publish, final)
    except CheckpointError:
        if exchange.rank == 0:
            _remove(unfinished)
        raise
    return final


def _arrays(tables: ShardedTables) -> dict[str, np.ndarray]:
    """What this rank writes of tables; data-parallel ones are rank 0's."""
    arrays: dict[str, np.ndarray] = {}
    for number, shard in enumerate(tables.held()):
        if shard.placement.kind == "data" and tables.exchange.rank:
            continue
        name = f"{number}:{shard.table.name}"
        arrays[f"{name}:rows"] = shard.rows
        arrays[f"{name}:columns"] = np.array(shard.columns)
        arrays[f"{name}:shard"] = np.array([shard.index])
        arrays |= {f"{name}:{key}": value for key, value in shard.arrays().items()}
    return arrays


def _flushed(file: Path) -> tuple[int, str]:
    """Size [bytes] and digest of a file, read back from the disk."""
    handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    return file.stat().st_size, digest_file(file)


def _together(ranks: int, act: Callable[[], _Done], final: Path) -> list[_Done]:
    """Let every rank do its part of a save; what each returned.

    Raises:
        CheckpointError: on every rank, if one of them failed.
    """
    done: list[_Done] = []
    fault = ""
    try:
        done.append(act())
    except (OSError, SafetensorError) as error:
        fault = _why(error)
    rows = gather(ranks, (done, fault))
    for rank, (_, fault) in enumerate(rows):
        if fault:
            raise CheckpointError(
                f"Rank {rank} could not write the checkpoint {final} ({fault}; "
                f"{disk_of(final.parent)}). Free some space there, or make it writable."
            )
    return [each for done, _ in rows for each in done]


def _why(error: Exception) -> str:
    """What the system said; safetensors puts its number in words of its own."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (said := re.search(r"(?:code:|os error) (\d+)", str(error))):
        number = int(said[1])
    return os.strerror(number) if number else str(error)


def _remove(path: Path) -> None:
    """Remove a folder, or whatever has its name."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _drop_older(root: Path, step: int, verified: set[Path]) -> None:
    """Remove what killed saves have left, and checkpoints but for the newest that are right."""
    for left in root.glob(".step-*"):
        _remove(left)
    kept = 0
    for path in find_checkpoints(root):
        if step_of(path) > step:
            continue
        if kept == _KEEP:
            _remove(path)
        elif path in verified or not find_damage(path):
            verified.add(path)
            kept += 1


def load(
    checkpoint: Path,
    tables: ShardedTables,
    dense: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> RankSaved:
    """Load a whole checkpoint (``whole.newest_whole``).

    Raises:
        CheckpointError: it is of other tables, of another model or of another optimizer.
    """
    facts = read_facts(checkpoint)
    ours = {p.table.name: [p.table.rows, p.table.width] for p in tables.plan.placements}
    if facts["tables"] != ours or facts["optimizer"] != tables.optimizer.name:
        raise CheckpointError(
            f"{checkpoint} has tables {_shapes(facts['tables'])} under {facts['optimizer']}, and "
            f"this run has {_shapes(ours)} under {tables.optimizer.name}. Choose another folder "
            "with --out, or train what the checkpoint has."
        )
    for shard in tables.held():
        filled = np.zeros(shard.count, dtype=np.int64)
        for file in stored_files(checkpoint, facts):
            filled += _take(file, shard)
        width = shard.columns[1] - shard.columns[0]
        if (filled != width).any():
            raise CheckpointError(
                f"{checkpoint} lacks rows of table {shard.table.name}. Remove this folder, so that "
                "the run goes on from the one before."
            )
    state = torch.load(checkpoint / DENSE, weights_only=True)
    held, own = (
        {n: tuple(t.shape) for n, t in each.items()}
        for each in (state["dense"], dense.state_dict())
    )
    if held != own:
        name = next(each for each in (*own, *held) if held.get(each) != own.get(each))
        raise CheckpointError(
            f"{checkpoint} holds another model: its {name} is {held.get(name, 'missing')} (this "
            f"run: {own.get(name, 'none')}). Restore a checkpoint of this run, or choose another "
            "folder with --out."
        )
    dense.load_state_dict(state["dense"])
    optimizer.load_state_dict(state["optimizer"])
    tables.load_parts(lambda name: torch.load(checkpoint / f"{name}.pt", weights_only=True))
    tables.number = int(facts["number"])
    return RankSaved(int(facts["step"]), list(facts["losses"]), facts["best"])


def _shapes(tables: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {rows:,} x {width}" for name, (rows, width) in tables.items())


def _take(file: Path, shard: TableShard) -> np.ndarray:
    """Copy what a file has of a shard; how many columns of each of its rows that was."""
    filled = np.zeros(shard.count, dtype=np.int64)
    begin, end = shard.columns
    with safe_open(file, framework="numpy") as stored:
        keys = list(stored.keys())
        for key in keys:
            prefix, _, what = key.rpartition(":")
            if prefix.partition(":")[2] != shard.table.name or what != "columns":
                continue
            first, last = stored.get_tensor(key).tolist()
            left, right = max(begin, first), min(end, last)
            rows = stored.get_tensor(f"{prefix}:rows")
            _, own, theirs = np.intersect1d(
                shard.rows, rows, assume_unique=True, return_indices=True
            )
            if left >= right or not len(own):
                continue
            if shard.held is not None:
                parts = {
                    name.rpartition(":")[2]: stored.get_tensor(name)
                    for name in keys
                    if name.startswith(f"{prefix}:")
                }
                is_same = np.array_equal(rows, shard.rows)
                shard.held.take(own, theirs, parts, is_same=is_same)
            held = shard.state if shard.held else shard.state | {"weight": shard.weight}
            for part, every in held.items():
                values = torch.from_numpy(stored.get_tensor(f"{prefix}:{part}")[theirs])
                if every.ndim == 1:
                    every[own] = values
                else:
                    every[own, left - begin : right - begin] = values[
                        :, left - first : right - first
                    ]
            filled[own] += right - left
    return filled
