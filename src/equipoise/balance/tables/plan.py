"""Place embedding tables so that the slowest rank's lookups and exchange end soonest.

Why
    The field's default planner packs shards by storage and leaves its slowest rank 11% over the
    mean where packing by cost leaves half a percent. Memory is what must fit, not what is waited
    for.

What it decides
    The kind, ranks and buckets of each table. Tables stay whole unless their load or their bytes
    exceed a rank's share; those are divided by the cheapest kind whose shards fit under it, at
    several sizes of that share, and the best outcome stands. Of few tables some are divided more
    finely than the others: 26 equal ones leave a rank of eight with four whole, where 24 whole and
    two divided are even. Shards are dealt heaviest first and repaired (``balance.partition``), with
    memory as a constraint; few whole tables by differencing, too. At last columns are cut where
    ranks are full (``balance.tables.level``).

    The bound is what no plan of these kinds at these prices can beat: all tables at their
    cheapest over all ranks, or the cheapest shard of the costliest table.

Kept true (tests/unit/balance/test_tables.py)
    Never below the bound; equal to brute force on small cases; nothing over capacity; the answer
    depends on the arguments alone; 10,000 tables on 1,024 ranks are planned.

Sources
    LPT by cost under a capacity: Neo, arXiv:2104.05158, section 4.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.bound import largest_bin_bound
from equipoise.balance.partition import karmarkar_karp, partition, repair
from equipoise.balance.tables.level import level_columns
from equipoise.balance.tables.options import ShardOption, ShardOptions
from equipoise.balance.tables.price import PS_PER_S, TableMachine
from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import FitError, SpecError
from equipoise.base.shown import counted, shown
from equipoise.base.units import format_bytes
from equipoise.schedule.tables.placement import (
    BUCKETS,
    SHARD_KINDS,
    Buckets,
    ShardKind,
    TablePlacement,
    TablePlan,
)
from equipoise.spec.tables.table import TableSpec, row_bytes

_SHARES = (1.0, 0.5, 0.25, 0.125, 4.0)
"""Parts of the mean load above which a table is divided, each tried."""
_LEFT_OUT: Sequence[tuple[ShardKind, ...]] = ((), ("data",), ("table-row",), ("data", "table-row"))
"""Kinds without which plans are tried as well, where the first are off the bound."""
_ALL = 1e9
"""A share of the mean load above which no table is."""
_CLOSE = 0.005
"""Gap to the bound at which the search ends."""
_FEW, _MOST_FINER = 256, 16
"""Tables up to which some are tried at a finer division than the others; how many at most."""


@dataclass(frozen=True, eq=False)
class TableAnswer:
    """A plan of tables with its price."""

    plan: TablePlan
    machine: TableMachine
    compute_ps: Ints
    """Each rank's lookups and updates, int64 [ranks]."""
    exchange_ps: Ints
    held_bytes: Ints
    """Rows and their optimizer's state on each rank, int64 [ranks]."""
    bound_ps: int
    """What no slowest rank of such a plan could be below."""

    @property
    def load_s(self) -> Floats:
        """Seconds of each rank, float64 [ranks]."""
        return (self.compute_ps + self.exchange_ps) / PS_PER_S

    @property
    def skew(self) -> float:
        """The slowest rank over the mean; 1 where nothing costs anything."""
        mean = float(self.load_s.mean())
        return float(self.load_s.max()) / mean if mean else 1.0

    @property
    def gap(self) -> float:
        """The slowest rank over the bound, minus one."""
        return self.most_ps / self.bound_ps - 1.0 if self.bound_ps else 0.0

    @property
    def most_ps(self) -> int:
        """The slowest rank's load."""
        return int((self.compute_ps + self.exchange_ps).max())


def plan_tables(
    tables: Sequence[TableSpec],
    machine: TableMachine,
    *,
    kinds: Sequence[ShardKind] = SHARD_KINDS,
    buckets: Buckets | None = None,
    row_counts: Mapping[str, Ints] | None = None,
) -> TableAnswer:
    """Place tables on ranks.

    Args:
        tables: What is placed, at least one.
        machine: The ranks.
        kinds: Which kinds of sharding may be used.
        buckets: How rows are dealt; by cost where lookups are known, else modulo.
        row_counts: Lookups of each row in a trace, by table, int64 [rows]; without them all
            buckets of a table are taken to be alike.

    Returns:
        The plan, each rank's load and bytes, and the bound.

    Raises:
        SpecError: nothing to place, no kind, an unknown one, or lookups that cannot be.
        FitError: a table fits no rank, or all do not fit together; says the least ranks.

    Cost: O(n log n) in shards, for each plan tried: one where the first is near the bound, at
    most 21, and up to 96 more of few tables, three of them levelled.

    >>> two = [TableSpec("a", 10, 4), TableSpec("b", 10, 4)]
    >>> answer = plan_tables(two, TableMachine(2, 8, 1e9, 1e9, 1e9), kinds=["table"])
    >>> [each.ranks for each in answer.plan.placements], answer.skew
    ([(0,), (1,)], 1.0)
    """
    if not tables:
        raise SpecError("There is no table to place. Give one or more.")
    unknown = sorted(set(kinds) - set(SHARD_KINDS))
    if unknown or not kinds:
        raise SpecError(
            f"{', '.join(map(shown, unknown)) or 'none'}: no such kind of sharding. Choose from "
            f"{', '.join(SHARD_KINDS)}."
        )
    if buckets is not None and buckets not in BUCKETS:
        raise SpecError(f"{shown(buckets)} is not one of {', '.join(BUCKETS)}.")
    planner = _Planner(tables, machine, kinds, buckets, row_counts or {})
    planner.require_room()
    best: TableAnswer | None = None
    for left_out in _LEFT_OUT:
        if left_out and not set(left_out) <= set(kinds):
            continue
        for share in _SHARES:
            answer = planner.place(share, left_out)
            if answer is None:
                continue
            if best is None or answer.most_ps < best.most_ps:
                best = answer
            if best.gap <= _CLOSE:
                return best
    if best is None:  # tables of many bytes and little load stayed whole
        best = planner.place(0.0, ("data",))
    if best is None:
        raise planner.no_room()
    finer: list[TableAnswer] = planner.place_finer() if len(tables) <= _FEW else []
    answers = sorted([best, *finer], key=lambda each: each.most_ps)
    if len(tables) <= 4 * _FEW and "column" in kinds:  # from these, and from whole tables
        starts = (answers[0], best, planner.place(_ALL))
        whole = "table" in kinds
        answers += [level_columns(s, may_be_whole=whole) for s in starts if s is not None]
    return min(answers, key=lambda each: each.most_ps)


class _Planner:
    def __init__(
        self,
        tables: Sequence[TableSpec],
        machine: TableMachine,
        kinds: Sequence[ShardKind],
        buckets: Buckets | None,
        row_counts: Mapping[str, Ints],
    ) -> None:
        self.tables, self.machine, self.kinds = tuple(tables), machine, tuple(kinds)
        self.make = ShardOptions(machine, buckets, row_counts)
        whole = [kind for kind in ("table", "data") if kind in self.kinds] or self.kinds
        self.whole = [[self.make.make(table, kind) for kind in whole] for table in self.tables]
        self.first = [self._cheapest(options) for options in self.whole]
        self.mean_ps = max(1, sum(each.total_ps for each in self.first) // machine.ranks)
        self.options: dict[tuple[int, ShardKind, int], ShardOption] = {}
        self.bound_ps = self._bound()

    def _cheapest(self, options: list[ShardOption]) -> ShardOption:
        """The option of least total among those that fit, or among all if none does."""
        fitting = [each for each in options if self._fits(each)]
        return min(fitting or options, key=lambda each: (each.total_ps, each.most_ps))

    def _fits(self, option: ShardOption) -> bool:
        return max(option.held_bytes) <= self.machine.capacity_bytes

    def _bound(self) -> int:
        """At least: everything at its cheapest over all ranks, or one table's lightest shard."""
        ranks = self.machine.ranks
        if self.kinds == ("table",):
            weights = np.array([each.total_ps for each in self.first], dtype=np.int64)
            return largest_bin_bound(weights, ranks)
        total, single = 0, 0
        for index, table in enumerate(self.tables):
            shards = [self.first[index]]
            is_small = self.first[index].most_ps * ranks < self.mean_ps
            if not is_small or len(self.tables) <= 1024:  # others cannot be the heaviest
                shards += [self.make.make(table, kind, self._most(table)) for kind in self.kinds]
                single = max(single, min(each.most_ps for each in shards))
            total += min(each.total_ps for each in (*shards, *self.whole[index]))
        return max(-(-total // ranks), single)

    def _most(self, table: TableSpec) -> int:
        return min(self.machine.ranks, table.width)

    def _option(self, index: int, kind: ShardKind, shards: int) -> ShardOption:
        key = (index, kind, shards)
        if key not in self.options:
            self.options[key] = self.make.make(self.tables[index], kind, shards)
        return self.options[key]

    def _choose(self, index: int, limit_ps: float, left_out: tuple[ShardKind, ...]) -> ShardOption:
        """The cheapest option whose shards are under the limit; else that of lightest shards.

        Under a limit of 0 it is that of fewest bytes on a rank.
        """
        first, table = self.first[index], self.tables[index]
        if first.kind in left_out and "table" in self.kinds:
            first = self._option(index, "table", 1)
        if first.most_ps <= limit_ps and self._fits(first):
            return first
        options = [first]
        for kind in self.kinds:
            if kind in left_out:
                continue
            shards = 1
            if kind == "column":
                by_load = -(-first.total_ps // max(1, int(limit_ps)))
                held = table.rows * row_bytes(table.width, self.machine.optimizer)
                by_bytes = -(-held // self.machine.capacity_bytes)
                shards = min(self._most(table), max(2, by_load, by_bytes))
            options.append(self._option(index, kind, shards))
        options = [each for each in options if self._fits(each)] or options
        light = [each for each in options if each.most_ps <= limit_ps]
        if light:
            return min(light, key=lambda each: (each.total_ps, each.most_ps))
        if not limit_ps:
            return min(options, key=lambda each: (max(each.held_bytes), each.most_ps))
        return min(options, key=lambda each: (each.most_ps, each.total_ps))

    def place_finer(self) -> list[TableAnswer]:
        """Plans in which the lightest tables are divided by a smaller share than the others."""
        order = sorted(range(len(self.tables)), key=lambda i: (self.first[i].total_ps, i))
        answers: list[TableAnswer | None] = []
        for at, share in enumerate(_SHARES[:3]):
            for smaller in _SHARES[at + 1 : 4]:
                limits = share * self.mean_ps, smaller * self.mean_ps
                options = [[self._choose(i, each, ()) for each in limits] for i in order]
                changed = [i for i, (a, b) in zip(order, options, strict=True) if a is not b]
                most = min(len(changed), self.machine.ranks, _MOST_FINER)
                answers += [
                    self.place(share, finer=(smaller, changed[: count + 1]))
                    for count in range(most)
                ]
        return [each for each in answers if each is not None]

    def place(
        self,
        share: float,
        left_out: tuple[ShardKind, ...] = (),
        finer: tuple[float, Sequence[int]] = (1.0, ()),
    ) -> TableAnswer | None:
        """The plan in which tables above a share of the mean load are divided; None: no room.

        ``finer`` is the share of some tables, by their places.
        """
        ranks, local = self.machine.ranks, self.machine.per_host
        shares = np.full(len(self.tables), share)
        shares[list(finer[1])] = finer[0]
        limits_ps = (shares * self.mean_ps).tolist()
        chosen = [self._choose(i, limit_ps, left_out) for i, limit_ps in enumerate(limits_ps)]
        compute, exchange, held = (np.zeros(ranks, dtype=np.int64) for _ in range(3))

        def add(option: ShardOption, where: slice | Ints) -> None:
            for sums, values in (
                (compute, option.compute_ps),
                (exchange, option.exchange_ps),
                (held, option.held_bytes),
            ):
                if isinstance(where, slice):
                    sums[where] += np.array(values)
                else:
                    np.add.at(sums, where, np.array(values))

        rank_of: dict[int, tuple[int, ...]] = {}
        for index, option in enumerate(chosen):
            if option.kind in ("row", "data"):
                add(option, slice(None))
                rank_of[index] = tuple(range(ranks))
        hosted = [i for i, option in enumerate(chosen) if option.kind == "table-row"]
        for index in sorted(hosted, key=lambda i: (-chosen[i].total_ps, i)):
            loads = (compute + exchange).reshape(-1, local).max(axis=1)
            after = held.reshape(-1, local) + np.array(chosen[index].held_bytes)
            is_full = after.max(axis=1) > self.machine.capacity_bytes
            begin = int(np.lexsort((loads, is_full))[0]) * local
            add(chosen[index], slice(begin, begin + local))
            rank_of[index] = tuple(range(begin, begin + local))
        free = [i for i in range(len(chosen)) if i not in rank_of]
        parts = [(i, shard) for i in free for shard in range(chosen[i].shards)]
        weights = np.array(
            [chosen[i].compute_ps[s] + chosen[i].exchange_ps[s] for i, s in parts], dtype=np.int64
        )
        sizes = np.array([chosen[i].held_bytes[s] for i, s in parts], dtype=np.int64)
        capacity, filled = self.machine.capacity_bytes, (compute + exchange, held.copy())
        if int(held.max()) > capacity:
            return None
        bins = partition(weights, ranks, sizes=sizes, capacity=capacity, filled=filled)
        if bins is None:  # the largest first leave more room, and are then exchanged by load
            largest_first = held.copy(), held.copy()
            bins = partition(sizes, ranks, capacity=capacity, filled=largest_first)
            if bins is None:
                return None
            repair(weights, sizes, bins, capacity, filled=filled)
        elif self.kinds == ("table",) and len(parts) <= _FEW:
            bins = self._lighter(weights, sizes, bins)
        ends = np.cumsum([chosen[i].shards for i in free])
        for index, shards in zip(free, np.split(bins, ends[:-1]) if free else [], strict=True):
            add(chosen[index], shards)
            rank_of[index] = tuple(shards.tolist())
        placements = tuple(
            TablePlacement(
                table,
                option.kind,
                rank_of[index],
                self.make.buckets_of(option),
                option.owner,
            )
            for index, (table, option) in enumerate(zip(self.tables, chosen, strict=True))
        )
        plan = TablePlan(placements, ranks, self.machine.ranks_per_host)
        return TableAnswer(plan, self.machine, compute, exchange, held, self.bound_ps)

    def _lighter(self, weights: Ints, sizes: Ints, bins: Ints) -> Ints:
        """The ranks of whole tables, or those of differencing where the slowest ends sooner."""
        ranks, capacity = self.machine.ranks, self.machine.capacity_bytes
        other, nothing = karmarkar_karp(weights, ranks), np.zeros(ranks, dtype=np.int64)
        repair(weights, sizes, other, capacity, filled=(nothing, nothing))
        before, after = (np.bincount(each, weights, ranks).max() for each in (bins, other))
        fits = np.bincount(other, sizes, ranks).max() <= capacity
        return other if fits and after < before else bins

    def require_room(self) -> None:
        """Refuse a table of which no kind leaves a rank little enough to hold.

        Raises:
            FitError: says on how many ranks it would fit.
        """
        capacity, machine = self.machine.capacity_bytes, self.machine
        for index, table in enumerate(self.tables):
            if self._fits(self.first[index]):
                continue
            options = [self.make.make(table, kind, self._most(table)) for kind in self.kinds]
            if any(self._fits(each) for each in options):
                continue
            per_row = row_bytes(table.width, machine.optimizer)
            whole = table.rows * per_row
            most = capacity // per_row
            head = (
                f"Table {table.name} needs {format_bytes(whole)} with {machine.optimizer}'s state, "
                f"and {_each(machine.ranks)} holds {format_bytes(capacity)}."
            )
            if most < 1:
                raise FitError(f"{head} Not even one row of it fits. Give ranks more memory.")
            least = -(-table.rows // most)
            if least <= machine.ranks:
                raise FitError(f"{head} Allow kind row: its rows fit on {counted(least, 'rank')}.")
            raise FitError(f"{head} Divided by rows it needs at least {least:,} ranks.")

    def no_room(self) -> FitError:
        """The refusal of tables that do not fit together."""
        total = sum(
            table.rows * row_bytes(table.width, self.machine.optimizer) for table in self.tables
        )
        least = max(-(-total // self.machine.capacity_bytes), self.machine.ranks + 1)
        fix = f"Give at least {least:,} ranks, or ranks with more memory."
        if set(self.kinds) == {"data"}:
            fix = "Copies take as much on any number of ranks: allow another kind."
        return FitError(
            f"{counted(len(self.tables), 'table')} together need {format_bytes(total)} with "
            f"{self.machine.optimizer}'s state, and {_each(self.machine.ranks)} holds "
            f"{format_bytes(self.machine.capacity_bytes)}. {fix}"
        )


def _each(ranks: int) -> str:
    """Whose memory is meant, before a verb."""
    return "the rank" if ranks == 1 else f"each of {ranks:,} ranks"
