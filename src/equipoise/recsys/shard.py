"""One rank's shards of embedding tables: their weights, drawn alike under every plan.

What it decides
    A weight depends on the seed, its table's name, its row and its column alone, so no plan
    changes what a model begins from: uniform within 1 / sqrt(rows), as DLRM draws them.

Kept true (tests/multi/recsys/test_tables.py)
    Shards of every plan, put together, are the table of one process to the bit.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from torch import Tensor

from equipoise.base.arrays import Ints
from equipoise.recsys.optimizer import SparseStep, make_state
from equipoise.schedule.tables.placement import TablePlacement
from equipoise.spec.tables.table import TableSpec

_CHUNK = 4096
"""Rows that one counter draws."""


@dataclass(slots=True, eq=False)
class TableShard:
    """Some rows and columns of a table, with what the optimizer keeps of them."""

    placement: TablePlacement
    index: int
    """Which shard of the table; 0 of a data-parallel one."""
    weight: Tensor
    """float32 [rows of the shard, columns of it]."""
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def table(self) -> TableSpec:
        """The table that it is a part of."""
        return self.placement.table

    @property
    def rows(self) -> Ints:
        """Which rows of the table, in their order here."""
        return self.placement.row_map.rows_of(self.placement.row_shard(self.index))

    @property
    def columns(self) -> tuple[int, int]:
        """First and one past the last column."""
        return self.placement.columns(self.index)


def make_shard(
    placement: TablePlacement, index: int, step: SparseStep, seed: int, device: torch.device
) -> TableShard:
    """A shard with its first weights and an empty state."""
    rows = placement.row_map.rows_of(placement.row_shard(index))
    begin, end = placement.columns(index)
    weight = torch.from_numpy(draw_rows(placement.table, rows, seed)[:, begin:end].copy())
    weight = weight.to(device)
    return TableShard(placement, index, weight, make_state(step, weight))


def draw_rows(table: TableSpec, rows: Ints, seed: int) -> np.ndarray:
    """First weights of some ascending rows, float32 [rows, width]."""
    drawn = np.empty((len(rows), table.width), dtype=np.float32)
    key = xxhash.xxh64_intdigest(table.name.encode())
    bound = table.rows**-0.5
    chunks, starts = np.unique(rows // _CHUNK, return_index=True)
    ends = np.append(starts[1:], len(rows))[: len(starts)]
    for chunk, begin, end in zip(chunks, starts, ends, strict=True):
        counter = np.array([0, 0, 0, chunk], dtype=np.uint64)
        philox = np.random.Philox(key=np.array([key, seed], dtype=np.uint64), counter=counter)
        count = min(_CHUNK, table.rows - int(chunk) * _CHUNK)
        whole = np.random.Generator(philox).random((count, table.width), dtype=np.float32)
        drawn[begin:end] = (2 * whole - 1)[rows[begin:end] - chunk * _CHUNK] * bound
    return drawn
