"""Fill ranks to one level, one after the other, and cut a table's columns where a rank is full.

Why
    26 equal tables on 16 ranks leave ten ranks with two of them where 1.6 are a rank's share. Cut
    evenly, tables come in halves and quarters, and every shard is sent the ids once more. Cut where
    ranks are full, they fill every rank, and there is no more than one cut for each rank.

What it decides
    Which columns of the tables that lie whole, or divided by columns, are on which rank; all other
    tables stay where they are. The level is the lowest that bisection finds at which the last
    table still has room. Where that is not below the plan's slowest rank, the plan stands.

Kept true (tests/unit/balance/tables/test_level.py, by Hypothesis)
    Each column of a table has one rank; loads and bytes are those of the shards at their prices;
    never slower than the plan given, never over capacity, never below its bound.

Sources
    Filling one machine after the other, and cutting jobs between them: R. McNaughton, "Scheduling
    with Deadlines and Loss Functions", 1959.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from equipoise.balance.tables.price import TableMachine, price_shard
from equipoise.base.arrays import Ints
from equipoise.schedule.tables.placement import TablePlacement
from equipoise.spec.tables.table import TableSpec, row_bytes

if TYPE_CHECKING:
    from equipoise.balance.tables.plan import TableAnswer

_CLOSE = 0.0005
"""How near bisection comes to the lowest level, of it."""
_BEHIND = 64
"""Ranks passed by that are tried again for each table."""
_GAIN = 0.005
"""By how much the slowest rank must end sooner, of its load: more shards are more calls."""


class _ColumnPart(NamedTuple):
    """Some columns of a table on a rank."""

    table: int
    rank: int
    begin: int
    end: int


class _PartPrice(NamedTuple):
    """What they cost the rank."""

    compute_ps: int
    load_ps: int
    held_bytes: int


def level_columns(answer: "TableAnswer", *, may_be_whole: bool = True) -> "TableAnswer":
    """The plan with whole and column-wise tables dealt anew; the plan given if it is as fast.

    Args:
        answer: The plan, which divides some tables by columns or might.
        may_be_whole: Whether an undivided table is of kind table; else it is one range of columns.

    Cost: O(tables + ranks) for each of at most 15 levels.
    """
    placements = answer.plan.placements
    free = [at for at, each in enumerate(placements) if each.kind in ("table", "column")]
    filler = _Filler([placements[at].table for at in free], answer.machine)
    given = [
        _ColumnPart(table, rank, *placements[at].columns(shard))
        for table, at in enumerate(free)
        for shard, rank in enumerate(placements[at].ranks)
    ]
    before = np.stack(
        (answer.compute_ps, answer.compute_ps + answer.exchange_ps, answer.held_bytes)
    )
    fixed = before - filler.sum(given)
    low, high = max(answer.bound_ps, int(fixed[1].max())), int((1 - _GAIN) * answer.most_ps)
    best: list[_ColumnPart] | None = None
    while high - low > _CLOSE * high:
        level = (low + high) // 2
        parts = filler.fill(level, fixed[1].tolist(), fixed[2].tolist())
        if parts is None:
            low = level
        else:
            high, best = level, parts
    if best is None:
        return answer
    compute, load, held = fixed + filler.sum(best)
    moved = list(placements)
    for table, at in enumerate(free):
        own = [part for part in best if part.table == table]
        moved[at] = _placement(placements[at].table, own, may_be_whole=may_be_whole)
    return replace(
        answer,
        plan=replace(answer.plan, placements=tuple(moved)),
        compute_ps=compute,
        exchange_ps=load - compute,
        held_bytes=held,
    )


def _placement(
    table: TableSpec, parts: Sequence[_ColumnPart], *, may_be_whole: bool
) -> TablePlacement:
    ranks = tuple(part.rank for part in parts)
    if len(parts) == 1 and may_be_whole:
        return TablePlacement(table, "table", ranks)
    return TablePlacement(table, "column", ranks, edges=(0, *(part.end for part in parts)))


class _Filler:
    """Tables, heaviest first, onto ranks that have a level."""

    def __init__(self, tables: Sequence[TableSpec], machine: TableMachine) -> None:
        self._tables, self._machine = tables, machine
        self._prices: dict[tuple[int, int], _PartPrice] = {}
        whole = [self._price(at, table.width).load_ps for at, table in enumerate(tables)]
        self._order = sorted(range(len(tables)), key=lambda at: (-whole[at], at))
        self._lightest = min(whole, default=0)

    def sum(self, parts: Sequence[_ColumnPart]) -> Ints:
        """What parts cost their ranks: compute, load and bytes, int64 [3, ranks]."""
        sums = np.zeros((3, self._machine.ranks), dtype=np.int64)
        for part in parts:
            sums[:, part.rank] += self._price(part.table, part.end - part.begin)
        return sums

    def fill(self, level_ps: int, load: list[int], held: list[int]) -> list[_ColumnPart] | None:
        """Parts of all tables under a level; None: the last ones have no room.

        ``load`` and ``held`` are what each rank has already, and are added to.
        """
        parts: list[_ColumnPart] = []
        rank = 0
        behind: list[int] = []  # ranks passed by, which may have room for a lighter table

        def add(table: int, where: int, begin: int, end: int) -> None:
            price = self._price(table, end - begin)
            load[where] += price.load_ps
            held[where] += price.held_bytes
            parts.append(_ColumnPart(table, where, begin, end))

        def room(table: int, where: int, most: int) -> int:
            left = self._machine.capacity_bytes - held[where]
            return self._fitting(table, most, level_ps - load[where], left)

        for table in self._order:
            begin, width = 0, self._tables[table].width
            whole, capacity = self._price(table, width), self._machine.capacity_bytes
            early = next(
                (
                    each
                    for each in behind
                    if load[each] + whole.load_ps <= level_ps
                    and held[each] + whole.held_bytes <= capacity
                ),
                None,
            )
            if early is not None:
                add(table, early, 0, width)
                continue
            while begin < width:
                if rank == self._machine.ranks:
                    return None
                columns = room(table, rank, width - begin)
                if columns:
                    add(table, rank, begin, begin + columns)
                    begin += columns
                if begin < width:
                    if level_ps - load[rank] >= self._lightest and len(behind) < _BEHIND:
                        behind.append(rank)
                    rank += 1
        return parts

    def _fitting(self, table: int, most: int, room_ps: int, room_bytes: int) -> int:
        """The most columns of a table for which there is room; 0 where they would not pay.

        A part costs the ids once more. Where its columns are less than that, they lie elsewhere.
        """

        def fits(columns: int) -> bool:
            price = self._price(table, columns)
            return price.load_ps <= room_ps and price.held_bytes <= room_bytes

        if fits(most):
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        if not low:
            return 0
        own, rest, whole = (self._price(table, c).load_ps for c in (low, most - low, most))
        return low if own > own + rest - whole else 0

    def _price(self, table: int, columns: int) -> _PartPrice:
        known = self._prices.get((table, columns))
        if known is None:
            spec, machine = self._tables[table], self._machine
            price = price_shard(spec, machine, columns=columns)
            held = spec.rows * row_bytes(columns, machine.optimizer)
            known = self._prices[table, columns] = _PartPrice(
                price.compute_ps, price.total_ps, held
            )
        return known
