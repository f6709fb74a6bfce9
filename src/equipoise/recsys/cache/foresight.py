"""An epoch's coming steps, for caches of tables that decide by trace.

Kept true (tests/multi/recsys/test_precision.py)
    A resumed run equals one that was not interrupted; predicted hits are near measured ones.
"""

import numpy as np
import torch

from equipoise.base.arrays import Ints
from equipoise.recsys.bags import locate_rows
from equipoise.recsys.embedding import ShardedTables
from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.samples import Samples
from equipoise.recsys.shard import TableShard
from equipoise.schedule.tiers.replay import replay_hits


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
    tables: ShardedTables, samples: Samples, order: Ints, batch: int
) -> dict[str, tuple[int, int]]:
    """Hits and reads of an epoch that begins with empty caches, by replay of their decisions.

    Arguments are those of ``expect_epoch``.

    Returns:
        For each table whose rows lie behind a cache, rows found in slots and rows read.
    """
    batches, exchange = _batches(samples, order, batch), tables.exchange
    hits: dict[str, tuple[int, int]] = {}
    for shard in tables.held():
        if shard.held is None:
            continue
        cache, steps = shard.held.cache, _places(shard, batches)
        reads = steps
        if shard.placement.kind == "data":  # a rank reads the rows of its own samples alone
            shares = [_share(each, exchange.rank, exchange.ranks) for each in batches]
            reads = _places(shard, shares)
        hit_counts = replay_hits(steps, cache.slots, cache.policy, ways=cache.ways, reads=reads)
        before = hits.get(shard.table.name, (0, 0))
        hits[shard.table.name] = before[0] + int(hit_counts.sum()), before[1] + sum(map(len, reads))
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
