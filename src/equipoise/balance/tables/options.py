"""The ways to place one table, each with its shards' prices and bytes.

Kept true (tests/unit/balance/test_tables.py)
    Shards of a table add up to at least the whole, in seconds and in bytes.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from equipoise.balance.tables.price import (
    ShardPrice,
    TableMachine,
    price_copy,
    price_host_shard,
    price_shard,
)
from equipoise.balance.tables.rows import bucket_loads, deal_rows
from equipoise.base.arrays import Ints
from equipoise.base.errors import SpecError
from equipoise.schedule.tables.placement import Buckets, RowMap, ShardKind
from equipoise.spec.tables.table import TableSpec, row_bytes


class ShardOption(NamedTuple):
    """One way to place one table."""

    kind: ShardKind
    compute_ps: tuple[int, ...]
    exchange_ps: tuple[int, ...]
    held_bytes: tuple[int, ...]
    owner: Ints | None = None
    copies: int = 1
    """How often the shards listed are there: buckets that are taken to be alike."""

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.compute_ps) * self.copies

    @property
    def most_ps(self) -> int:
        """The heaviest shard's price."""
        return max(a + b for a, b in zip(self.compute_ps, self.exchange_ps, strict=True))

    @property
    def total_ps(self) -> int:
        """The sum over all shards."""
        return (sum(self.compute_ps) + sum(self.exchange_ps)) * self.copies


@dataclass(frozen=True)
class ShardOptions:
    """Makes options for the ranks of a machine."""

    machine: TableMachine
    buckets: Buckets | None = None
    row_counts: Mapping[str, Ints] = field(default_factory=dict)

    def make(self, table: TableSpec, kind: ShardKind, shards: int = 1) -> ShardOption:
        """A table's shards under one kind.

        Args:
            table: What is placed.
            kind: How.
            shards: Ranges of columns; other kinds have as many shards as they must.
        """
        machine = self.machine
        whole_bytes = table.rows * row_bytes(table.width, machine.optimizer)
        if kind == "table":
            return _alike(kind, price_shard(table, machine), whole_bytes, 1)
        if kind == "data":
            return _alike(kind, price_copy(table, machine), whole_bytes, machine.ranks)
        if kind == "column":
            count = max(1, min(shards, machine.ranks, table.width))
            edges = [shard * table.width // count for shard in range(count + 1)]
            widths = [end - begin for begin, end in itertools.pairwise(edges)]
            priced = {width: price_shard(table, machine, columns=width) for width in set(widths)}
            bytes_of = {width: table.rows * row_bytes(width, machine.optimizer) for width in priced}
            each_bytes = [bytes_of[width] for width in widths]
            return _each(kind, [priced[width] for width in widths], each_bytes)
        count = machine.ranks if kind == "row" else machine.per_host
        price = price_shard if kind == "row" else price_host_shard
        per_row = row_bytes(table.width, machine.optimizer)
        if table.name not in self.row_counts:
            held_bytes = -(-table.rows // count) * per_row
            return _alike(kind, price(table, machine, share=1.0 / count), held_bytes, count)
        row_map, shares = self._deal(table, count, machine.capacity_bytes // per_row)
        known = {share: price(table, machine, share=share) for share in set(shares)}
        held = [row_map.count(shard) * per_row for shard in range(count)]
        return _each(kind, [known[share] for share in shares], held, row_map.owner)

    def buckets_of(self, option: ShardOption) -> Buckets:
        """How an option deals rows."""
        if option.owner is not None:
            return "by-cost"
        return "contiguous" if self.buckets == "contiguous" else "modulo"

    def _deal(self, table: TableSpec, count: int, most: int) -> tuple[RowMap, list[float]]:
        """The buckets of a table's rows, and the share of ids that falls into each.

        Buckets of equal traffic may have unequal rows. Where one exceeds ``most``, what a rank
        holds, rows are dealt by their ids, unless the caller asked for these buckets.
        """
        counts = np.asarray(self.row_counts[table.name])
        if len(counts) != table.rows:
            raise SpecError(
                f"Table {table.name} has {table.rows:,} rows, and lookups of {len(counts):,} are "
                "given. Give one for each row."
            )
        if counts.dtype.kind not in "iu" or int(counts.min()) < 0:
            raise SpecError(
                f"Table {table.name}: lookups of a row must be a whole number, 0 or more. Count "
                "them over a trace."
            )
        buckets = self.buckets or "by-cost"
        owner = deal_rows(counts, count) if buckets == "by-cost" else None
        if owner is not None and not self.buckets and int(np.bincount(owner).max()) > most:
            owner, buckets = None, "modulo"
        row_map = RowMap(table.rows, count, buckets, owner)
        loads = bucket_loads(counts, row_map)
        return row_map, (loads / max(1, int(loads.sum()))).tolist()


def _alike(kind: ShardKind, price: ShardPrice, held_bytes: int, copies: int) -> ShardOption:
    prices = (price.compute_ps,), (price.exchange_ps,)
    return ShardOption(kind, *prices, (held_bytes,), copies=copies)


def _each(
    kind: ShardKind, prices: list[ShardPrice], held: list[int], owner: Ints | None = None
) -> ShardOption:
    return ShardOption(
        kind,
        tuple(each.compute_ps for each in prices),
        tuple(each.exchange_ps for each in prices),
        tuple(held),
        owner,
    )
