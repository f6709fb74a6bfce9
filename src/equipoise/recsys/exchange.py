"""Exchanges among all ranks, whose bytes are counted by stage and by peer.

Why
    Every byte of a step passes here, so what is sent can be held against the plan's formula.

What it decides
    An exchange may begin long before its bytes are needed. They are counted with the step that
    needs them, whenever they travelled.

Kept true (tests/multi/recsys/test_tables.py)
    Bytes equal ``schedule.tables.traffic`` on every link, in every stage.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.schedule.tables.traffic import STAGES


@dataclass(slots=True, eq=False)
class TableSwap:
    """An exchange under way."""

    stage: str
    sizes: list[int]
    """Bytes to each rank."""
    expected: list[int]
    """Bytes from each."""
    sent: Tensor
    """Kept until the bytes have left."""
    arrived: Tensor
    work: dist.Work | None
    """None within a process alone."""


class TableExchange:
    """Moves blocks of bytes between all ranks of the default group, or within a process alone."""

    def __init__(self, *, alone: bool = False) -> None:
        if not (alone or dist.is_initialized()):
            raise LayoutError(
                "No ranks have joined, so there is nobody to exchange with. Start ranks first, or "
                "pass alone=True."
            )
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
        under_way = self.begin(stage, blocks, expected)
        self.count(under_way)
        return self.end(under_way)

    def begin(self, stage: str, blocks: Sequence[Tensor], expected: Sequence[int]) -> TableSwap:
        """Start what ``swap`` does; the rank computes while bytes travel, and calls ``end``.

        All ranks begin their exchanges in one order. Nothing is counted before ``count``.
        """
        sizes, received = [len(block) for block in blocks], list(expected)
        if self.ranks == 1:
            return TableSwap(stage, sizes, received, blocks[0], blocks[0], None)
        data = torch.cat(list(blocks))
        arrived = data.new_empty(sum(received))
        work = dist.all_to_all_single(arrived, data, received, sizes, async_op=True)
        return TableSwap(stage, sizes, received, data, arrived, work)

    def count(self, under_way: TableSwap) -> None:
        """Count the bytes of an exchange that has begun."""
        for peer in range(self.ranks):
            if peer != self.rank:
                self.sent[under_way.stage][peer] += under_way.sizes[peer]
                self.received[under_way.stage][peer] += under_way.expected[peer]

    def end(self, under_way: TableSwap) -> list[Tensor]:
        """Wait for the bytes of an exchange that has begun: for each rank, uint8 [bytes]."""
        if under_way.work is None:
            return [under_way.arrived]
        under_way.work.wait()
        # Bytes are read as 64-bit numbers, which must begin at multiples of 8.
        return [
            part if part.storage_offset() % 8 == 0 else part.clone()
            for part in under_way.arrived.split(under_way.expected)
        ]


class TimedExchange(TableExchange):
    """An exchange that counts its uses and their seconds, waits for other ranks included."""

    def __init__(self, *, alone: bool = False) -> None:
        super().__init__(alone=alone)
        self.spent_s, self.swaps = 0.0, 0

    def begin(self, stage: str, blocks: Sequence[Tensor], expected: Sequence[int]) -> TableSwap:
        """As ``TableExchange.begin``."""
        began = time.perf_counter()
        under_way = super().begin(stage, blocks, expected)
        self.spent_s += time.perf_counter() - began
        return under_way

    def count(self, under_way: TableSwap) -> None:
        """As ``TableExchange.count``."""
        super().count(under_way)
        self.swaps += 1

    def end(self, under_way: TableSwap) -> list[Tensor]:
        """As ``TableExchange.end``."""
        began = time.perf_counter()
        arrived = super().end(under_way)
        self.spent_s += time.perf_counter() - began
        return arrived


def as_bytes(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Tensors end to end as bytes; on ``like``'s device where there are none."""
    # Without elements a tensor may have a stride of 0, and torch cannot view its bytes.
    filled = [part.contiguous().flatten().view(torch.uint8) for part in parts if part.numel()]
    return torch.cat(filled) if filled else like.new_empty(0, dtype=torch.uint8)
