"""Bags of ids on their way to the ranks that hold their rows.

Kept true (tests/multi/recsys/test_tables.py)
    Every id reaches each shard of its row once, in the order of (rank, sample, position).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.base.arrays import Ints
from equipoise.schedule.tables.placement import RowMap, TablePlan


@dataclass(slots=True, eq=False)
class Bags:
    """Bags of one feature."""

    lengths: Tensor
    """int32 [bags]."""
    ids: Tensor
    """int64 [sum of lengths]."""

    def count_by_rank(self, sizes: Sequence[int]) -> Ints:
        """Ids of bags that came from each rank, int64 [ranks]."""
        parts = self.lengths.split(list(sizes))
        return np.array([int(part.sum()) for part in parts], dtype=np.int64)


def split_bags(
    plan: TablePlan, by_table: Mapping[str, Bags], ranks: int
) -> list[list[tuple[Tensor, Tensor]]]:
    """What each rank is sent: lengths and ids for each of its shards, in the plan's order."""
    sent: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(ranks)]
    for each in plan.placements:
        if each.kind == "data":
            continue
        own = by_table[each.table.name]
        parts = split_rows(own, each.row_map)
        for shard, rank in enumerate(each.ranks):
            bags = parts[each.row_shard(shard)]
            sent[rank].append((bags.lengths, bags.ids))
    return sent


def split_rows(bags: Bags, row_map: RowMap) -> list[Bags]:
    """Bags by bucket of rows: ids become places in the bucket, in the order that they had."""
    if row_map.shards == 1:
        return [bags]
    owner, place = locate_rows(bags.ids, row_map)
    count = len(bags.lengths)
    bag_of = torch.repeat_interleave(torch.arange(count, device=bags.ids.device), bags.lengths)
    order = torch.argsort(owner, stable=True)
    lengths = torch.bincount(owner * count + bag_of, minlength=row_map.shards * count)
    lengths_SB = lengths.view(row_map.shards, count).to(torch.int32)
    parts = place[order].split(lengths_SB.sum(dim=1).tolist())
    return [Bags(lengths_SB[shard], part) for shard, part in enumerate(parts)]


def locate_rows(ids: Tensor, row_map: RowMap) -> tuple[Tensor, Tensor]:
    """The shard of each id's row, and its place there."""
    if row_map.buckets == "contiguous":
        return ids // row_map.block, ids % row_map.block
    if row_map.buckets == "modulo":
        return ids % row_map.shards, ids // row_map.shards
    index = ids.cpu().numpy()
    place = torch.from_numpy(row_map.place[index]).to(ids.device)
    owner = row_map.owner if row_map.owner is not None else row_map.place
    return torch.from_numpy(owner[index]).to(ids.device), place
