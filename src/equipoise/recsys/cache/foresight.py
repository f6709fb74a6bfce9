"""An epoch's coming steps, for caches of tables that decide by trace.

Kept true (tests/multi/recsys/test_precision.py)
    A resumed run equals one that was not interrupted.
"""

import numpy as np
import torch

from equipoise.base.arrays import Ints
from equipoise.recsys.bags import locate_rows
from equipoise.recsys.embedding import ShardedTables
from equipoise.recsys.samples import Samples


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
    batches = [
        samples.batch(order[begin : begin + batch])[0] for begin in range(0, len(order), batch)
    ]
    for shard in tables.held():
        if shard.held is None:
            continue
        row_map, own = shard.placement.row_map, shard.placement.row_shard(shard.index)
        places = []
        for each in batches:
            rows = torch.unique(each.bags(shard.table.name)[1])
            owner, place = locate_rows(rows, row_map)
            places.append(np.sort(place[owner == own].numpy()))
        shard.held.cache.expect(places, first)
