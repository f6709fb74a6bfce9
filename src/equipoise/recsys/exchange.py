"""One exchange among all ranks, whose bytes are counted by stage and by peer.

Why
    Every byte of a step passes here, so what is sent can be held against the plan's formula.

Kept true (tests/multi/recsys/test_tables.py)
    Bytes equal ``schedule.tables.traffic`` on every link, in every stage.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.base.arrays import Ints
from equipoise.schedule.tables.traffic import STAGES


class TableExchange:
    """Moves blocks of bytes between all ranks of the default group, or within a process alone."""

    def __init__(self, *, alone: bool = False) -> None:
        self.rank = 0 if alone else dist.get_rank()
        self.ranks = 1 if alone else dist.get_world_size()
        self.sent: dict[str, Ints] = {}
        self.received: dict[str, Ints] = {}
        self.clear()

    def clear(self) -> None:
        """Forget what has been counted."""
        self.sent = {stage: np.zeros(self.ranks, dtype=np.int64) for stage in STAGES}
        self.received = {stage: np.zeros(self.ranks, dtype=np.int64) for stage in STAGES}

    def swap(self, stage: str, blocks: Sequence[Tensor], expected: Sequence[int]) -> list[Tensor]:
        """Give each rank its block and get one from each.

        Args:
            stage: Under which the bytes are counted.
            blocks: For each rank, uint8 [bytes]; empty where there is nothing to send.
            expected: How many bytes come from each rank.

        Returns:
            For each rank, uint8 [bytes].
        """
        sizes = [len(block) for block in blocks]
        for peer in range(self.ranks):
            if peer != self.rank:
                self.sent[stage][peer] += sizes[peer]
                self.received[stage][peer] += expected[peer]
        if self.ranks == 1:
            return [blocks[0]]
        data = torch.cat(list(blocks))
        arrived = data.new_empty(sum(expected))
        dist.all_to_all_single(arrived, data, list(expected), sizes)
        # Bytes are read as 64-bit numbers, which must begin at multiples of 8.
        return [
            part if part.storage_offset() % 8 == 0 else part.clone()
            for part in arrived.split(list(expected))
        ]


def as_bytes(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Tensors end to end as bytes; on ``like``'s device where there is none."""
    if not parts:
        return like.new_empty(0, dtype=torch.uint8)
    return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts])
