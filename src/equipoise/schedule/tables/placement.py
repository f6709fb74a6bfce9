"""Where each row and column of an embedding table lies: the one form that every plan takes.

Why
    Table-wise, row-wise, column-wise, table-row-wise and data-parallel tables are one thing: rows
    dealt to shards, columns cut at edges, and a rank for each shard. With one form there is one
    executor, and no kind of sharding has a meaning of its own::

        kind        rows of a shard            columns    ranks
        table       all                        all        one
        row         a bucket of them           all        any
        table-row   a bucket of them           all        those of one host
        column      all                        a range    any
        data        all                        all        every rank holds a copy

    Towers gather some tables on one host, which condenses a sample's rows of them before they
    leave it.

Kept true (tests/unit/schedule/test_tables.py, by Hypothesis)
    Every row has one shard and one place in it, under each kind of bucket; shards are whole.

Sources
    Kinds of sharding: Neo, arXiv:2104.05158, section 4.2. Contiguous buckets are torchrec's.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.base.shown import counted, shown
from equipoise.spec.tables.table import TableSpec

ShardKind = Literal["table", "row", "table-row", "column", "data"]
SHARD_KINDS: tuple[ShardKind, ...] = get_args(ShardKind)
Buckets = Literal["contiguous", "modulo", "by-cost"]
BUCKETS: tuple[Buckets, ...] = get_args(Buckets)


@dataclass(frozen=True)
class RowMap:
    """Which shard holds a row, and where in it. Works on NumPy arrays and on tensors alike."""

    rows: int
    shards: int
    buckets: Buckets = "contiguous"
    owner: Ints | None = None
    """``by-cost``: the shard of each row, int64 [rows]."""

    @cached_property
    def block(self) -> int:
        """Rows of a contiguous bucket; the last may be short, or empty."""
        return -(-self.rows // self.shards)

    @cached_property
    def place(self) -> Ints:
        """``by-cost``: where each row lies in its shard, int64 [rows]; ascending in a shard."""
        owner = self._owner()
        order = np.argsort(owner, kind="stable")
        counts = np.bincount(owner, minlength=self.shards)
        place = np.empty(self.rows, dtype=np.int64)
        place[order] = np.arange(self.rows) - np.repeat(np.cumsum(counts) - counts, counts)
        return place

    def rows_of(self, shard: int) -> Ints:
        """The rows of a shard in their order there.

        >>> RowMap(5, 2).rows_of(1), RowMap(5, 2, "modulo").rows_of(1)
        (array([3, 4]), array([1, 3]))
        """
        if self.buckets == "contiguous":
            return np.arange(
                min(self.rows, shard * self.block), min(self.rows, (shard + 1) * self.block)
            )
        if self.buckets == "modulo":
            return np.arange(shard, self.rows, self.shards)
        return np.flatnonzero(self._owner() == shard)

    def count(self, shard: int) -> int:
        """Number of rows in a shard."""
        if self.buckets == "contiguous":
            return max(0, min(self.rows, (shard + 1) * self.block) - shard * self.block)
        if self.buckets == "modulo":
            return len(range(shard, self.rows, self.shards))
        return int((self._owner() == shard).sum())

    def _owner(self) -> Ints:
        if self.owner is None or len(self.owner) != self.rows:
            raise LayoutError(
                f"Buckets by cost need the shard of each of {self.rows:,} rows. Pass owner."
            )
        return self.owner


@dataclass(frozen=True, eq=False)
class TablePlacement:
    """One table's shards, each with its rank."""

    table: TableSpec
    kind: ShardKind
    ranks: tuple[int, ...]
    """The rank of each shard; of a data-parallel table, every rank."""
    buckets: Buckets = "contiguous"
    owner: Ints | None = None
    """As for ``RowMap``."""
    edges: tuple[int, ...] = ()
    """Where columns are cut, both ends included; evenly unless given."""

    def __post_init__(self) -> None:
        name, shards = self.table.name, len(self.ranks)
        for given, known in ((self.kind, SHARD_KINDS), (self.buckets, BUCKETS)):
            if given not in known:
                raise LayoutError(f"Table {name}: {shown(given)} is not one of {', '.join(known)}.")
        if self.kind == "table" and shards != 1:
            raise LayoutError(f"Table {name} lies whole on one rank, but {shards} are given.")
        if self.kind == "column" and shards > self.table.width:
            raise LayoutError(
                f"Table {name} has {self.table.width} columns for {shards} shards. Give at most "
                f"{self.table.width} ranks."
            )
        if self.edges:
            cuts = [0, *self.edges[1:-1], self.table.width]
            is_ascending = all(a < b for a, b in itertools.pairwise(cuts))
            if self.kind != "column" or [*self.edges] != cuts or not is_ascending:
                raise LayoutError(
                    f"Table {name}: columns cannot be cut at {_listed(self.edges)}. Give ascending "
                    f"edges from 0 to {self.table.width}, to a table of kind column."
                )
            if len(cuts) != shards + 1:
                raise LayoutError(
                    f"Table {name} has {counted(len(cuts) - 1, 'range')} of columns for "
                    f"{counted(shards, 'rank')}. Give a rank for each."
                )
        if self.kind in ("row", "table-row") and len(set(self.ranks)) != shards:
            raise LayoutError(f"Table {name} has two buckets of rows on one rank. Give each once.")
        if self.owner is not None and len(self.owner):
            low, high = int(self.owner.min()), int(self.owner.max())
            if low < 0 or high >= shards:
                raise LayoutError(
                    f"Table {name} has rows in buckets {low} to {high}, and there are {shards}. "
                    f"Number them 0 to {shards - 1}."
                )

    @property
    def row_shards(self) -> int:
        """Into how many buckets the rows are dealt."""
        return len(self.ranks) if self.kind in ("row", "table-row") else 1

    @cached_property
    def row_map(self) -> RowMap:
        """The shard of each row, and its place there."""
        return RowMap(self.table.rows, self.row_shards, self.buckets, self.owner)

    @cached_property
    def column_edges(self) -> tuple[int, ...]:
        """Where columns are cut: shard i has columns ``edges[i]:edges[i + 1]`` if they are."""
        shards = len(self.ranks) if self.kind == "column" else 1
        return self.edges or tuple(
            shard * self.table.width // shards for shard in range(shards + 1)
        )

    def shards_on(self, rank: int) -> list[int]:
        """The shards that a rank holds, ascending."""
        return [shard for shard, each in enumerate(self.ranks) if each == rank]

    def columns(self, shard: int) -> tuple[int, int]:
        """First and one past the last column of a shard."""
        if self.kind != "column":
            return 0, self.table.width
        return self.column_edges[shard], self.column_edges[shard + 1]

    def row_shard(self, shard: int) -> int:
        """Which bucket of rows a shard holds."""
        return shard if self.row_shards > 1 else 0


@dataclass(frozen=True, slots=True)
class TowerPlacement:
    """Tables of one host, and what leaves it for each sample instead of their rows."""

    tables: tuple[str, ...]
    """In the order in which the tower's module reads them."""
    host: int
    vectors: int
    """Vectors that leave for each sample."""
    width: int
    """Floats of each."""
    weights: int = 0
    """Weights of its module; every rank of the host has a copy."""


@dataclass(frozen=True, eq=False)
class TablePlan:
    """Every table's placement on some ranks, several to a host."""

    placements: tuple[TablePlacement, ...]
    ranks: int
    ranks_per_host: int = 0
    """0: all ranks are on one host."""
    towers: tuple[TowerPlacement, ...] = ()
    """Every table is in one of them, or there are none."""

    def __post_init__(self) -> None:
        names = [each.table.name for each in self.placements]
        if len(set(names)) < len(names):
            raise LayoutError("Two tables have one name. Rename one.")
        if self.ranks < 1 or self.ranks % self.per_host:
            raise LayoutError(
                f"{counted(self.ranks, 'rank')} cannot fill hosts of {self.per_host:,}. Give a "
                "multiple."
            )
        for each in self.placements:
            self._require(each)
        if self.towers:
            self._require_towers()

    def _require_towers(self) -> None:
        inside = [name for tower in self.towers for name in tower.tables]
        require_each_once(inside, [each.table.name for each in self.placements])
        for each in self.placements:
            name, host = each.table.name, self.tower_of(each.table.name).host
            if each.kind in ("row", "data"):
                raise LayoutError(
                    f"Table {name} is in a tower and of kind {each.kind}, which reaches beyond a "
                    "host. Place it as table, table-row or column."
                )
            if any(rank // self.per_host != host for rank in each.ranks):
                raise LayoutError(
                    f"Table {name} lies on ranks {_listed(each.ranks)}, and its tower is on host "
                    f"{host} of {self.hosts}, which has {counted(self.per_host, 'rank')}. Place "
                    "it there."
                )

    def _require(self, placement: TablePlacement) -> None:
        name, given = placement.table.name, placement.ranks
        if not given or min(given) < 0 or max(given) >= self.ranks:
            raise LayoutError(
                f"Table {name} lies on ranks {_listed(given)}, and there are {self.ranks}. Plan "
                "it for these ranks."
            )
        if placement.kind == "data" and given != tuple(range(self.ranks)):
            raise LayoutError(f"Table {name} is data-parallel, so all {self.ranks} ranks hold it.")
        if placement.kind == "table-row":
            host = given[0] // self.per_host
            if given != tuple(range(host * self.per_host, (host + 1) * self.per_host)):
                raise LayoutError(
                    f"Table {name} is divided inside a host, but ranks {_listed(given)} are not "
                    f"the {self.per_host} ranks of one, in order."
                )

    @property
    def per_host(self) -> int:
        """Ranks of a host."""
        return self.ranks_per_host or self.ranks

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.ranks // self.per_host

    def tower_of(self, table: str) -> TowerPlacement:
        """The tower that a table is in."""
        return next(tower for tower in self.towers if table in tower.tables)

    def towers_on(self, host: int) -> list[tuple[int, TowerPlacement]]:
        """The towers of a host, each with its number."""
        return [(at, tower) for at, tower in enumerate(self.towers) if tower.host == host]

    @property
    def outputs(self) -> tuple[TableSpec, ...]:
        """The vectors that a sample's rank gets: the tables', or those that leave the towers.

        Towers that keep a vector for each table give them in the tables' order; others stand
        side by side.
        """
        tables = [each.table for each in self.placements]
        if self.keeps_tables:
            widths = {name: tower.width for tower in self.towers for name in tower.tables}
            return tuple(replace(each, width=widths.get(each.name, each.width)) for each in tables)
        return tuple(
            TableSpec(f"tower {at} vector {vector}", 1, tower.width)
            for at, tower in enumerate(self.towers)
            for vector in range(tower.vectors)
        )

    @property
    def keeps_tables(self) -> bool:
        """Whether a sample's rank gets one vector for each table."""
        return all(tower.vectors == len(tower.tables) for tower in self.towers)

    @property
    def vector_order(self) -> tuple[int, ...]:
        """Where each vector of ``outputs`` stands among those of all towers, side by side."""
        if not self.keeps_tables:
            return tuple(range(sum(tower.vectors for tower in self.towers)))
        names = [name for tower in self.towers for name in tower.tables]
        return tuple(names.index(each.table.name) for each in self.placements)

    def held_rows(self, rank: int) -> dict[str, int]:
        """How many rows of each table a rank holds, counted once for each range of columns."""
        return {
            each.table.name: sum(
                each.row_map.count(each.row_shard(shard)) for shard in each.shards_on(rank)
            )
            for each in self.placements
        }


def require_each_once(inside: Sequence[str], names: Sequence[str]) -> None:
    """Refuse towers that do not hold each table once.

    Raises:
        LayoutError: names both.
    """
    if sorted(inside) != sorted(names):
        raise LayoutError(
            f"Towers hold {_listed(sorted(inside))}, and the tables are {_listed(sorted(names))}. "
            "Put each table into one tower."
        )


def _listed(items: Sequence[object]) -> str:
    shown = ", ".join(map(str, items[:8]))
    return f"{shown}, ..." if len(items) > 8 else shown or "(none)"
