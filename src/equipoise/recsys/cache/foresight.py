"""An epoch's coming steps, for caches of tables that decide by trace.

Kept true (tests/multi/recsys/test_precision.py)
    A resumed run equals one that was not interrupted; predicted hits are those measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from equipoise.base.arrays import Ints
from equipoise.recsys.bags import locate_rows
from equipoise.recsys.embedding import ShardedTables
from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.samples import Samples
from equipoise.recsys.shard import TableShard
from equipoise.schedule.tables.placement import TablePlacement
from equipoise.schedule.tiers.cache import SetCache


def expect_epoch(
    tables: ShardedTables, samples: Samples, order: Ints, batch: int, first: int
) -> None:
    """Tell caches that decide by trace the rows of an epoch's steps.

    Args:
        tables: This rank's.
        samples: All samples.
        order: The epoch's order of training samples.
        batch: Samples of a step, over all ranks.
        first: The number of the epoch's first step, from 0.
    """
    batches = _batches(samples, order, batch)
    for shard in tables.held():
        if shard.held is not None:
            shard.held.cache.expect(_places(shard, batches), first)


@dataclass(frozen=True, slots=True)
class CachedShard:
    """A shard of a table and the cache before its rows, empty."""

    placement: TablePlacement
    index: int
    cache: SetCache


def caches_of(tables: ShardedTables) -> list[CachedShard]:
    """The shards of a rank whose rows lie behind a cache, with caches of the same sizes."""
    return [
        CachedShard(
            shard.placement,
            shard.index,
            SetCache(shard.count, own.slots, own.policy, ways=own.ways),
        )
        for shard in tables.held()
        if shard.held is not None and (own := shard.held.cache)
    ]


def predict_hits(
    shards: Sequence[CachedShard],
    rank: int,
    ranks: int,
    samples: Samples,
    orders: Sequence[Ints],
    batch: int,
    steps: range,
) -> dict[str, tuple[int, int]]:
    """Hits and reads of some steps of a run, by replay of its caches' decisions from the first on.

    Args:
        shards: A rank's, with empty caches.
        rank: Which one.
        ranks: Of how many.
        samples: All samples.
        orders: Each epoch's order of training samples, from the first epoch to the last step's.
        batch: Samples of a step, over all ranks.
        steps: Which steps are counted, by their numbers from 0.

    Returns:
        For each table whose rows lie behind a cache, rows found in slots and rows read.
    """
    hits = {each.placement.table.name: (0, 0) for each in shards}
    begin = 0
    for order in orders:
        batches = _batches(samples, order, batch)
        own = [_share(each, rank, ranks) for each in batches]
        for each in shards:
            wanted = _places(each, batches)
            # A rank reads the rows of its own samples alone of a table that it has a copy of.
            reads = _places(each, own) if each.placement.kind == "data" else wanted
            each.cache.expect(wanted, begin)
            hit_rows, count = hits[each.placement.table.name]
            for number, (rows, read) in enumerate(zip(wanted, reads, strict=True), start=begin):
                if number in steps:
                    hit_rows += int((each.cache.find(read) >= 0).sum())
                    count += len(read)
                each.cache.admit(rows)
            hits[each.placement.table.name] = hit_rows, count
        begin += len(batches)
    return hits


def _share(batch: KeyedJagged, rank: int, ranks: int) -> KeyedJagged:
    """A rank's consecutive share of a batch."""
    count = batch.samples
    return batch.select(rank * count // ranks, (rank + 1) * count // ranks)


def _batches(samples: Samples, order: Ints, batch: int) -> list[KeyedJagged]:
    return [samples.batch(order[begin : begin + batch])[0] for begin in range(0, len(order), batch)]


def _places(shard: TableShard | CachedShard, batches: list[KeyedJagged]) -> list[Ints]:
    """For each batch, the distinct places of a shard that it looks up, ascending."""
    row_map, own = shard.placement.row_map, shard.placement.row_shard(shard.index)
    places = []
    for each in batches:
        rows = torch.unique(each.bags(shard.placement.table.name)[1])
        owner, place = locate_rows(rows, row_map)
        places.append(np.sort(place[owner == own].numpy()))
    return places
