"""Ranks that share the weights of each expert: rows of all to each, and the sums of them back.

What it decides
    Each of these ranks has a run of every expert's hidden units, and rows of its own. All of them
    get all rows, compute their part of every output, and the parts are summed where the row came
    from. The backward pass is the same the other way round::

        rank 0   rows a b    --gather-->  a b c  --hidden units 0 1-->  parts  --sum-->  a b
        rank 1   rows c      --gather-->  a b c  --hidden units 2 3-->  parts  --sum-->  c

    Rows are as uneven as routers made them, so both ways are one uneven all-to-all; sums are taken
    in the order of ranks.

Kept true (tests/multi/parallel/test_expert.py)
    Gathering and summing are each other's backward; with them loss and gradients equal one rank's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.comm.mesh import Peers


@dataclass(frozen=True, slots=True, eq=False)
class ExpertSplit:
    """This rank among those that share the weights of its experts."""

    peers: Peers

    def tell(self, counts: Tensor) -> Tensor:
        """Every rank's counts, in the order of ranks [ranks, ...]."""
        rows = counts.new_empty(self.peers.count * counts.numel())
        dist.all_gather_single(rows, counts.flatten().contiguous(), group=self.peers.group)
        return rows.view(self.peers.count, *counts.shape)

    def gather(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Every rank's rows, differentiable; rank ``r`` has ``sizes[r]``."""
        out: Tensor = _GatherParts.apply(rows, sizes, self)  # type: ignore[no-untyped-call]
        return out

    def sum_back(self, parts: Tensor, sizes: Sequence[int]) -> Tensor:
        """This rank's rows of the sum of all ranks' parts, differentiable."""
        out: Tensor = _SumBack.apply(parts, sizes, self)  # type: ignore[no-untyped-call]
        return out

    def move_to_all(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """What ``gather`` moves."""
        out = rows.new_empty(sum(sizes), *rows.shape[1:])
        sent = rows.repeat(self.peers.count, *(1 for _ in rows.shape[1:]))
        own = [len(rows)] * self.peers.count
        dist.all_to_all_single(out, sent, list(sizes), own, group=self.peers.group)
        return out

    def move_and_sum(self, parts: Tensor, sizes: Sequence[int]) -> Tensor:
        """What ``sum_back`` moves, and adds in the order of ranks."""
        own = [sizes[self.peers.rank]] * self.peers.count
        arrived = parts.new_empty(sum(own), *parts.shape[1:])
        dist.all_to_all_single(
            arrived, parts.contiguous(), own, list(sizes), group=self.peers.group
        )
        summed: Tensor = arrived.unflatten(0, (self.peers.count, own[0])).sum(0)
        return summed


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: Sequence[int], split: ExpertSplit) -> Tensor:
        ctx.way_back = (sizes, split)
        return split.move_to_all(rows, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sizes, split = ctx.way_back
        return split.move_and_sum(grads[0], sizes), None, None


class _SumBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, sizes: Sequence[int], split: ExpertSplit) -> Tensor:
        ctx.way_back = (sizes, split)
        return split.move_and_sum(parts, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sizes, split = ctx.way_back
        return split.move_to_all(grads[0], sizes), None, None
