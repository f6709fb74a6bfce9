"""A whole table in one process, pooled with the additions of the ranks that trained it.

Why
    A bag of several ids that was divided by rows is summed bucket by bucket. Summed in another
    order, its score would differ in the last place from that of training.

What it decides
    A bag's rows are added bucket by bucket where its table was divided by rows, and rounded where
    the exchange rounded: each shard's part, and the sum of a host once more. Rows may be packed;
    those that a batch looks up are unpacked.

Kept true (tests/multi/recsys/test_ahead.py)
    Pooled rows are those of the ranks, to the bit, for each kind of placement and wire.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.base.arrays import Ints
from equipoise.numerics.rows import RowFormat, row_bytes, unpack_rows
from equipoise.recsys.optimizer import pool
from equipoise.recsys.wire import decode, encode
from equipoise.schedule.tables.traffic import Wire
from equipoise.spec.tables.table import TableSpec

TableForm = RowFormat | str


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """How a table lay while it was trained."""

    owner: Ints | None = None
    """The bucket of each row, int64 [rows]; None: all rows lay together."""
    buckets: int = 1
    cuts: tuple[int, ...] = ()
    """Where its columns were cut, without the ends."""
    wire: Wire = "fp32"
    hops: int = 1
    """How often a pooled row was rounded to the wire's format: 0 of a copy, 2 inside a host."""


@dataclass(frozen=True, slots=True, eq=False)
class PooledTable:
    """A table and its rows."""

    table: TableSpec
    rows: Tensor
    """float32 or float16 [rows, width], or uint8 [rows, bytes]."""
    form: RowFormat | None = None
    """What the bytes are; None: floats."""
    division: Division = Division()

    @property
    def held_bytes(self) -> int:
        """Bytes of its rows."""
        return self.rows.numel() * self.rows.element_size()

    def read(self, rows: Tensor) -> Tensor:
        """Some rows, float32 [n, width]."""
        if self.form is None:
            return self.rows[rows].float()
        return unpack_rows(self.rows[rows], self.table.width, self.form)

    def pool(self, lengths: Tensor, ids: Tensor) -> Tensor:
        """Each sample's bag, float32 [samples, width]."""
        if self.rows.dtype == torch.float32:
            place, weight = ids, self.rows
        else:
            distinct, place = torch.unique(ids, return_inverse=True)
            weight = self.read(distinct)
        parts = self._parts(lengths, ids, place, weight)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        if self.division.hops > 1:
            total = self._round(total)
        if self.table.pooling == "mean":
            total = total / lengths.clamp(min=1).unsqueeze(1)
        return total

    def _parts(self, lengths: Tensor, ids: Tensor, place: Tensor, weight: Tensor) -> list[Tensor]:
        """The sum of each bucket."""
        division = self.division
        is_single = len(lengths) == 0 or int(lengths.max()) <= 1
        if division.owner is None or (is_single and division.wire == "fp32"):
            return [self._round(pool(place, lengths, weight))]
        owner = torch.from_numpy(division.owner)[ids]
        bag_of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        parts = []
        for bucket in range(division.buckets):
            is_here = owner == bucket
            counts = torch.bincount(bag_of[is_here], minlength=len(lengths))
            parts.append(self._round(pool(place[is_here], counts, weight)))
        return parts

    def _round(self, rows: Tensor) -> Tensor:
        """Rows as they come off the wire."""
        wire = self.division.wire
        if wire == "fp32" or not self.division.hops or not rows.numel():
            return rows
        edges = [0, *self.division.cuts, rows.shape[1]]
        widths = np.diff(edges).tolist()
        columns = rows.split(widths, dim=1)
        return torch.cat(
            [decode(encode(c, wire), w, wire) for c, w in zip(columns, widths, strict=True)], dim=1
        )


def form_bytes(rows: int, width: int, form: str) -> int:
    """Bytes of a table's rows in a format.

    >>> [form_bytes(10, 16, form) for form in ("fp32", "fp16", "int8", "int4", "int2")]
    [640, 320, 240, 120, 80]
    """
    if form in ("fp32", "fp16"):
        return rows * width * (4 if form == "fp32" else 2)
    packed: RowFormat = form  # type: ignore[assignment]
    return rows * row_bytes(width, packed)
