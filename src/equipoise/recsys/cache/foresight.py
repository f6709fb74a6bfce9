"""An epoch's coming steps, for caches of tables that decide by trace.

Kept true (tests/multi/recsys/test_precision.py)
    A resumed run equals one that was not interrupted; predicted hits are those measured.
"""

from collections.abc import Sequence

import numpy as np
import torch

from equipoise.base.arrays import Ints
from equipoise.recsys.bags import locate_rows
from equipoise.recsys.embedding import ShardedTables
from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.samples import Samples
from equipoise.recsys.shard import TableShard
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


def predict_hits(
    tables: ShardedTables, samples: Samples, orders: Sequence[Ints], batch: int, steps: range
) -> dict[str, tuple[int, int]]:
    """Hits and reads of some steps of a run, by replay of its caches' decisions from the first on.

    Args:
        tables: This rank's.
        samples: All samples.
        orders: Each epoch's order of training samples, from the first epoch to the last step's.
        batch: Samples of a step, over all ranks.
        steps: Which steps are counted, by their numbers from 0.

    Returns:
        For each table whose rows lie behind a cache, rows found in slots and rows read.
    """
    held = [(shard, shard.held.cache) for shard in tables.held() if shard.held is not None]
    twins = [SetCache(s.count, own.slots, own.policy, ways=own.ways) for s, own in held]
    hits = {shard.table.name: (0, 0) for shard, _ in held}
    exchange, begin = tables.exchange, 0
    for order in orders:
        batches = _batches(samples, order, batch)
        own = [_share(each, exchange.rank, exchange.ranks) for each in batches]
        for (shard, _), twin in zip(held, twins, strict=True):
            wanted = _places(shard, batches)
            # A rank reads the rows of its own samples alone of a table that it has a copy of.
            reads = _places(shard, own) if shard.placement.kind == "data" else wanted
            twin.expect(wanted, begin)
            found, count = hits[shard.table.name]
            for number, (rows, read) in enumerate(zip(wanted, reads, strict=True), start=begin):
                if number in steps:
                    found, count = found + int((twin.find(read) >= 0).sum()), count + len(read)
                twin.admit(rows)
            hits[shard.table.name] = found, count
        begin += len(batches)
    return hits


def _share(batch: KeyedJagged, rank: int, ranks: int) -> KeyedJagged:
    """A rank's consecutive share of a batch."""
    count = batch.samples
    return batch.select(rank * count // ranks, (rank + 1) * count // ranks)


def _batches(samples: Samples, order: Ints, batch: int) -> list[KeyedJagged]:
    return [samples.batch(order[begin : begin + batch])[0] for begin in range(0, len(order), batch)]


def _places(shard: TableShard, batches: list[KeyedJagged]) -> list[Ints]:
    """For each batch, the distinct places of a shard that it looks up, ascending."""
    row_map, own = shard.placement.row_map, shard.placement.row_shard(shard.index)
    places = []
    for each in batches:
        rows = torch.unique(each.bags(shard.table.name)[1])
        owner, place = locate_rows(rows, row_map)
        places.append(np.sort(place[owner == own].numpy()))
    return places
