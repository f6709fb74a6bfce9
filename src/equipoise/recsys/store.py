"""Checkpoints of a recommender: regions of tables, which any plan and number of ranks reads.

What it decides
    A rank writes its shards, each with the rows and columns that it is; data-parallel tables and
    the dense part are rank 0's, a tower's module that of one rank of its host. The folder has its
    name only once every rank has written. A rank that loads takes from each file the region that
    it holds.

Kept true (tests/multi/recsys/test_train.py)
    A checkpoint of one plan goes on under another, on another number of ranks, as if nothing had
    happened; a folder that was not finished is not read.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import nn

from equipoise.base.errors import CheckpointError
from equipoise.base.read import read_json, reason, require_file
from equipoise.recsys.embedding import ShardedTables
from equipoise.recsys.shard import TableShard
from equipoise.spec.names import CHECKPOINTS

_KEEP = 2
_MANIFEST = "recommend.json"
DENSE = "dense.pt"
"""The dense part and its optimizer, in a checkpoint."""


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
) -> Path:
    """Write a checkpoint; all ranks call it together.

    Returns:
        Its folder, ``checkpoint/step-000123``.
    """
    exchange = tables.exchange
    root = folder / CHECKPOINTS
    final, unfinished = root / f"step-{saved.step:06d}", root / f".step-{saved.step:06d}"
    if exchange.rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    _wait(exchange.ranks)
    arrays: dict[str, np.ndarray] = {}
    for number, shard in enumerate(tables.held()):
        if shard.placement.kind == "data" and exchange.rank:
            continue
        name = f"{number}:{shard.table.name}"
        arrays[f"{name}:rows"] = shard.rows
        arrays[f"{name}:columns"] = np.array(shard.columns)
        arrays[f"{name}:shard"] = np.array([shard.index])
        arrays |= {f"{name}:{key}": value for key, value in shard.arrays().items()}
    save_file(arrays, unfinished / f"rank-{exchange.rank:05d}.safetensors")
    for name, part in tables.parts().items():
        torch.save(part, unfinished / f"{name}.pt")
    if exchange.rank == 0:
        state = {"dense": dense.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, unfinished / DENSE)
        facts = asdict(saved) | {
            "optimizer": tables.optimizer.name,
            "number": tables.number,
            "ranks": exchange.ranks,
            "parts": tables.part_names(),
            "tables": {p.table.name: [p.table.rows, p.table.width] for p in tables.plan.placements},
            "kinds": {p.table.name: p.kind for p in tables.plan.placements},
        }
        (unfinished / _MANIFEST).write_text(json.dumps(facts), encoding="utf-8")
    _wait(exchange.ranks)
    if exchange.rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        for old in checkpoints(folder)[:-_KEEP]:
            shutil.rmtree(old)
    _wait(exchange.ranks)
    return final


def _wait(ranks: int) -> None:
    if ranks > 1:
        dist.barrier()


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(each.parent for each in (folder / CHECKPOINTS).glob(f"step-*/{_MANIFEST}"))


def newest_step(folder: Path) -> int | None:
    """The step of the newest whole checkpoint of a run's folder."""
    whole = checkpoints(folder)
    return int(whole[-1].name.removeprefix("step-")) if whole else None


def require_readable(folder: Path) -> None:
    """Refuse a newest checkpoint that is torn, before ranks start that would all fail on it.

    Raises:
        CheckpointError: names the file, and what is wrong with it.
    """
    for newest in checkpoints(folder)[-1:]:
        file = newest / _MANIFEST
        try:
            facts = _facts(file)
            for rank in range(facts["ranks"]):
                file = newest / f"rank-{rank:05d}.safetensors"
                require_file(file)
                with safe_open(file, framework="numpy"):
                    pass
            for name in (DENSE, *(f"{part}.pt" for part in facts["parts"])):
                file = newest / name
                require_file(file)
                torch.load(file, weights_only=True)
        except (OSError, *_TORN) as error:
            # torch says "invalid argument" of a file that was cut.
            says_why = isinstance(error, ValueError | FileNotFoundError)
            why = reason(error) if says_why else "it is damaged"
            raise CheckpointError(
                f"{file} cannot be read: {why}. Remove its folder, so that the run goes on from "
                "the checkpoint before."
            ) from None


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """What a whole checkpoint says of itself: its step, ranks and tables.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not what ``save`` writes.
    """
    return _facts(checkpoint / _MANIFEST)


_TORN = (ValueError, RuntimeError, EOFError, UnpicklingError, SafetensorError)
"""What readers raise of a file that was cut or written over."""


def _facts(file: Path) -> dict[str, Any]:
    """What the manifest of a checkpoint says.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not what ``save`` writes.
    """
    facts = read_json(file)
    if isinstance(facts, dict):
        facts.setdefault("parts", [])  # of a version without towers
    kinds = {
        "step": int,
        "losses": list,
        "best": dict | None,
        "optimizer": str,
        "number": int,
        "ranks": int,
        "parts": list,
        "tables": dict,
    }
    wrong = [
        name
        for name, kind in kinds.items()
        if not isinstance(facts, dict) or name not in facts or not isinstance(facts[name], kind)
    ]
    if wrong:
        raise ValueError(f"it does not say {wrong[0]} as a checkpoint does")
    return dict(facts)


def load_newest(
    folder: Path, tables: ShardedTables, dense: nn.Module, optimizer: torch.optim.Optimizer
) -> RankSaved | None:
    """Load the newest whole checkpoint of a run's folder, if there is one.

    Raises:
        CheckpointError: it is of other tables or of another optimizer.
    """
    whole = checkpoints(folder)
    if not whole:
        return None
    newest = whole[-1]
    facts = _facts(newest / _MANIFEST)
    ours = {p.table.name: [p.table.rows, p.table.width] for p in tables.plan.placements}
    if facts["tables"] != ours or facts["optimizer"] != tables.optimizer.name:
        raise CheckpointError(
            f"{newest} has tables {_shapes(facts['tables'])} under {facts['optimizer']}, and this "
            f"run has {_shapes(ours)} under {tables.optimizer.name}. Choose another folder with "
            "--out, or train what the checkpoint has."
        )
    for shard in tables.held():
        filled = np.zeros(shard.count, dtype=np.int64)
        for file in sorted(newest.glob("rank-*.safetensors")):
            filled += _take(file, shard)
        width = shard.columns[1] - shard.columns[0]
        if (filled != width).any():
            raise CheckpointError(
                f"{newest} lacks rows of table {shard.table.name}. Remove this folder, so that the "
                "run goes on from the one before."
            )
    state = torch.load(newest / DENSE, weights_only=True)
    dense.load_state_dict(state["dense"])
    optimizer.load_state_dict(state["optimizer"])
    tables.load_parts(lambda name: torch.load(newest / f"{name}.pt", weights_only=True))
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
