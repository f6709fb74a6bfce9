"""One rank's shards of embedding tables: their weights, drawn alike under every plan.

What it decides
    A weight depends on the seed, its table's name, its row and its column alone, so no plan
    changes what a model begins from: uniform within 1 / sqrt(rows), as DLRM draws them.

Kept true (tests/multi/recsys/test_tables.py)
    Shards of every plan, put together, are the table of one process to the bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from torch import Tensor

from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.recsys.cache.held import CachedRows
from equipoise.recsys.cache.packed import PackedRows, TablePrecision
from equipoise.recsys.optimizer import SparseStep, make_state, pool, update_rows
from equipoise.recsys.tiers.held import TableTiers, hold_in_file
from equipoise.schedule.tables.placement import TablePlacement
from equipoise.schedule.tiers.cache import SetCache
from equipoise.spec.tables.table import TableSpec

RowKeeping = TablePrecision | TableTiers
"""How rows are kept other than as fp32 in memory."""
_CHUNK = 4096
"""Rows that one counter draws."""
_COUNTER_FLOATS = 8
"""Floats of one Philox counter: 4 words of 64 bits, 2 floats of each."""


@dataclass(slots=True, eq=False)
class TableShard:
    """Some rows and columns of a table, with what the optimizer keeps of them."""

    placement: TablePlacement
    index: int
    """Which shard of the table; 0 of a data-parallel one."""
    weight: Tensor
    """float32 [rows of the shard, columns of it]; without rows where ``held`` has them."""
    state: dict[str, Tensor] = field(default_factory=dict)
    held: CachedRows | None = None
    """Rows in few bits, or in a file, behind a cache."""

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

    @property
    def count(self) -> int:
        """How many rows it has."""
        return self.placement.row_map.count(self.placement.row_shard(self.index))

    def arrays(self) -> dict[str, np.ndarray]:
        """Weights, or packed rows with their cache, and the optimizer's state."""
        parts = {name: part.cpu().numpy() for name, part in self.state.items()}
        if self.held is None:
            return parts | {"weight": self.weight.cpu().numpy()}
        return parts | self.held.arrays()

    def pool(self, ids: Tensor, lengths: Tensor, *, is_training: bool) -> Tensor:
        """The sum of each bag's rows in their order, float32 [bags, columns]."""
        if self.held is None:
            return pool(ids, lengths, self.weight)
        rows, place = torch.unique(ids, return_inverse=True)
        return pool(place, lengths, self.held.read(rows, is_training=is_training))

    def apply(
        self,
        step: SparseStep,
        rows: Tensor,
        grad: Tensor,
        *,
        number: int,
        squares: Tensor | None = None,
    ) -> None:
        """Apply one gradient to each row; arguments are those of ``update_rows``."""
        if self.held is None:
            update_rows(step, self.weight, self.state, rows, grad, number=number, squares=squares)
        else:
            self.held.apply(step, self.state, rows, grad, number=number, squares=squares)


def make_shard(
    placement: TablePlacement,
    index: int,
    step: SparseStep,
    seed: int,
    device: torch.device,
    kept: RowKeeping | None = None,
) -> TableShard:
    """A shard with its first weights and an empty state.

    Raises:
        LayoutError: a table that is divided by columns shall have rows of few bits.
    """
    rows = placement.row_map.rows_of(placement.row_shard(index))
    begin, end = placement.columns(index)
    table, none = placement.table, torch.empty((0, end - begin), device=device)
    if isinstance(kept, TablePrecision):
        held = _hold(placement, index, seed, device, kept)
        like = torch.empty((len(rows), table.width), device="meta")
        shapes = {name: part.shape for name, part in make_state(step, like).items()}
        state = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
        return TableShard(placement, index, none, state, held)
    if kept is not None and (table.name, index) in kept.slots:
        place = _namer(placement, index)

        def draw(at: Ints) -> np.ndarray:
            return draw_rows(table, place(torch.from_numpy(at)).numpy(), seed)[:, begin:end]

        count = placement.row_map.count(placement.row_shard(index))
        held = hold_in_file(kept, table.name, index, count, end - begin, step, draw, device)
        return TableShard(placement, index, none, {}, held)
    weight = torch.from_numpy(draw_rows(table, rows, seed)[:, begin:end].copy()).to(device)
    return TableShard(placement, index, weight, make_state(step, weight))


def _namer(placement: TablePlacement, index: int) -> Callable[[Tensor], Tensor]:
    """Which rows of the table lie at some places of a shard; a function that holds no rows."""
    row_map, bucket = placement.row_map, placement.row_shard(index)

    def name_rows(at: Tensor) -> Tensor:
        if row_map.buckets == "contiguous":
            return at + bucket * row_map.block
        if row_map.buckets == "modulo":
            return at * row_map.shards + bucket
        return torch.from_numpy(row_map.rows_of(bucket)).to(at.device)[at]

    return name_rows


def _hold(
    placement: TablePlacement,
    index: int,
    seed: int,
    device: torch.device,
    precision: TablePrecision,
) -> CachedRows:
    """Packed first weights, drawn some rows at a time, and an empty cache."""
    table = placement.table
    if placement.kind == "column":
        raise LayoutError(
            f"Table {table.name} is divided by columns, and its rows of {precision.form} have one "
            "scale each. Divide it by rows."
        )
    count, name_rows = placement.row_map.count(placement.row_shard(index)), _namer(placement, index)
    key, form = f"{seed}:{table.name}", precision.form
    tier = PackedRows(count, table.width, form, precision.rounding, key, name_rows, device)
    for begin in range(0, count, _CHUNK):
        places = torch.arange(begin, min(count, begin + _CHUNK))
        drawn = torch.from_numpy(draw_rows(table, name_rows(places).numpy(), seed))
        tier.fill(begin, drawn.to(device))
    slots = precision.slots(count, table.width)
    return CachedRows(tier, SetCache(count, slots, precision.policy), device)


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
        # Only the span of these rows is drawn: a counter makes 8 floats, and others are skipped.
        own = rows[begin:end] - chunk * _CHUNK
        first, last = int(own[0]) * table.width, (int(own[-1]) + 1) * table.width
        philox.advance(first // _COUNTER_FLOATS)
        skipped = first // _COUNTER_FLOATS * _COUNTER_FLOATS
        span = np.random.Generator(philox).random(last - skipped, dtype=np.float32)
        whole = span[first - skipped :].reshape(-1, table.width)
        drawn[begin:end] = (2 * whole - 1)[own - own[0]] * bound
    return drawn
