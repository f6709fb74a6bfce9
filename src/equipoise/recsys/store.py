"""Checkpoints of a recommender: regions of tables, which any plan and number of ranks reads.

What it decides
    A rank writes its shards (``saving``), each with the rows and columns that it is; data-parallel
    tables and the dense part are rank 0's, a tower's module that of one rank of its host. A rank
    that loads takes from each file the region that it holds.

Kept true (tests/multi/recsys/test_train.py, tests/multi/recsys/test_torn.py)
    A checkpoint of one plan goes on under another, on another number of ranks, as if nothing had
    happened; a folder that was not finished is not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from equipoise.base.errors import CheckpointError
from equipoise.recsys.embedding import ShardedTables
from equipoise.recsys.models.shards import take_shards
from equipoise.recsys.shard import TableShard
from equipoise.recsys.whole import read_facts, stored_files

DENSE = "dense.pt"
"""The dense part and its optimizer, in a checkpoint."""


@dataclass(frozen=True, slots=True)
class RankSaved:
    """Where a run stood."""

    step: int
    losses: list[float]
    best: Mapping[str, Any] | None


def shard_arrays(tables: ShardedTables) -> dict[str, np.ndarray]:
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
    load_module(checkpoint, dense, state["dense"])
    load_moments(optimizer, state["optimizer"])
    tables.load_parts(lambda name: torch.load(checkpoint / f"{name}.pt", weights_only=True))
    tables.number = int(facts["number"])
    return RankSaved(int(facts["step"]), list(facts["losses"]), facts["best"])


def load_module(checkpoint: Path, module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Fill the dense part, or a tower's module, from its state in a checkpoint.

    Raises:
        CheckpointError: the state is another model's; names the first weight that differs.
    """
    held, own = (
        {name: tuple(each.shape) for name, each in weights.items()}
        for weights in (state, module.state_dict())
    )
    if held != own:
        name = next(each for each in (*own, *held) if held.get(each) != own.get(each))
        raise CheckpointError(
            f"{checkpoint} holds another model: its {name} is {held.get(name, 'missing')} (this "
            f"run: {own.get(name, 'none')}). Restore a checkpoint of this run, or choose another "
            "folder with --out."
        )
    weights = module.state_dict()
    module.load_state_dict({key: take_shards(each, weights[key]) for key, each in state.items()})


def load_moments(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take the moments of a whole state of Adam; rates and decay stay those of this run."""
    weights = [each for group in optimizer.param_groups for each in group["params"]]
    moments = {
        at: {key: take_shards(each, weights[at]) for key, each in held.items()}
        for at, held in state["state"].items()
    }
    own = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": own})


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
