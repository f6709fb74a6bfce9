"""Runs of the ranks that share each expert's hidden units: rows of a run, and units of the rest.

What it decides
    With s ranks and a sharing of r, each run of r ranks computes the rows of its members; together
    they have every hidden unit, each 1 / r of them, where it keeps 1 / s. So a rank fetches the
    units of s / r - 1 others, and gives gradients of these back. With s = 4 and r = 2::

        rank        0      1      2      3
        keeps       a      b      c      d
        rows of     0 1    0 1    2 3    2 3
        units       a b    c d    a b    c d

    All of it is addressing in one process group: two uneven all-to-alls for rows and two for
    weights, whatever r is. Units that were fetched are dropped after the forward, and fetched again
    in the backward.

Kept true (tests/multi/parallel/test_tutel.py)
    Loss and every gradient equal one rank's under every r; whichever r ran before, the parameters
    of a rank are the same tensors.

Sources
    Tutel: arXiv:2206.03382, section 3.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.comm.mesh import Peers
from equipoise.nn.tensor import part_of
from equipoise.parallel.expert.copies import CopyTraffic

_UNITS_AT = (1, 1, 2)
"""The dim of hidden units in gates, up and down projections."""


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """One way to share rows and hidden units between the ranks of ``peers``."""

    peers: Peers
    r: int
    """Ranks that compute a row together; divides the peers."""
    ffn: int
    """Hidden units of a whole expert."""

    @property
    def members(self) -> range:
        """The ranks that share rows with this one."""
        first = self.peers.rank // self.r * self.r
        return range(first, first + self.r)

    def gather(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Rows of all members in order, differentiable; ``sizes`` of each member."""
        if self.r == 1:
            return rows
        out: Tensor = _Gathered.apply(rows, sizes, self)  # type: ignore[no-untyped-call]
        return out

    def sum_back(self, parts: Tensor, sizes: Sequence[int]) -> Tensor:
        """This rank's rows of the sum of the members' parts, differentiable."""
        if self.r == 1:
            return parts
        out: Tensor = _Summed.apply(parts, sizes, self)  # type: ignore[no-untyped-call]
        return out

    def move_rows(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """What ``gather`` moves."""
        out = rows.new_empty(sum(sizes), *rows.shape[1:])
        sent = rows.repeat(self.r, *(1 for _ in rows.shape[1:]))
        own = [len(rows)] * self.r
        dist.all_to_all_single(
            out, sent, self._spread(sizes), self._spread(own), group=self.peers.group
        )
        return out

    def move_sums(self, parts: Tensor, sizes: Sequence[int]) -> Tensor:
        """What ``sum_back`` moves, and adds in the order of ranks."""
        mine = sizes[self.peers.rank - self.members.start]
        own = [mine] * self.r
        out = parts.new_empty(mine * self.r, *parts.shape[1:])
        dist.all_to_all_single(
            out,
            parts.contiguous(),
            self._spread(own),
            self._spread(sizes),
            group=self.peers.group,
        )
        summed: Tensor = out.unflatten(0, (self.r, mine)).sum(0)
        return summed

    @property
    def remakes(self) -> bool:
        """Whether the backward fetches units again."""
        return True

    def fetch(self, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """1 / r of the units of each expert: [X, f, D], [X, f, D], [X, D, f]."""
        if self.r == self.peers.count:
            return weights
        experts, hidden = weights[0].shape[0], weights[0].shape[2]
        leaving = torch.cat([each.flatten() for each in weights])
        sizes = [3 * experts * self._units(rank) * hidden for rank in range(self.peers.count)]
        received = [sizes[rank] * (rank in self._wanted) for rank in range(self.peers.count)]
        sent = [len(leaving) * (rank in self._askers) for rank in range(self.peers.count)]
        out = leaving.new_empty(sum(received))
        dist.all_to_all_single(
            out, leaving.repeat(len(self._askers)), received, sent, group=self.peers.group
        )
        parts = out.split([sizes[rank] for rank in self._wanted])
        by_rank = [
            self._apart(part, experts, self._units(rank), hidden)
            for part, rank in zip(parts, self._wanted, strict=True)
        ]
        return tuple(
            torch.cat(each, dim=dim)
            for each, dim in zip(zip(*by_rank, strict=True), _UNITS_AT, strict=True)
        )

    def give_back(
        self, grads: tuple[Tensor, ...], weights: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Gradients of the units that this rank keeps, summed in the order of ranks."""
        if self.r == self.peers.count:
            return grads
        experts, mine, hidden = weights[0].shape
        units = [self._units(rank) for rank in self._wanted]
        split = [each.split(units, dim=dim) for each, dim in zip(grads, _UNITS_AT, strict=True)]
        leaving = torch.cat([part.flatten() for each in zip(*split, strict=True) for part in each])
        size = 3 * experts * mine * hidden
        sizes = [3 * experts * self._units(rank) * hidden for rank in range(self.peers.count)]
        sent = [sizes[rank] * (rank in self._wanted) for rank in range(self.peers.count)]
        received = [size * (rank in self._askers) for rank in range(self.peers.count)]
        out = leaving.new_empty(sum(received))
        dist.all_to_all_single(out, leaving, received, sent, group=self.peers.group)
        summed = out.view(len(self._askers), size).sum(0)
        return self._apart(summed, experts, mine, hidden)

    @property
    def fetched_units(self) -> int:
        """Hidden units of an expert that this rank computes with, and others keep.

        >>> peers = [Peers((0, 1, 2, 3), rank, None) for rank in range(4)]
        >>> [[Sharing(each, r, 10).fetched_units for each in peers] for r in (1, 2, 4)]
        [[7, 7, 7, 9], [3, 4, 6, 3], [0, 0, 0, 0]]
        """
        return sum(self._units(rank) for rank in self._wanted if rank != self.peers.rank)

    @property
    def _wanted(self) -> range:
        """The ranks whose units this one computes with."""
        width = self.peers.count // self.r
        first = self.peers.rank % self.r * width
        return range(first, first + width)

    @property
    def _askers(self) -> range:
        """The ranks that compute with this one's units."""
        width = self.peers.count // self.r
        return range(self.peers.rank // width, self.peers.count, self.r)

    def _units(self, rank: int) -> int:
        return len(part_of(self.ffn, ranks=self.peers.count, rank=rank))

    def _spread(self, sizes: Sequence[int]) -> list[int]:
        """Sizes of members as sizes of all ranks."""
        first = self.members.start
        return [0] * first + list(sizes) + [0] * (self.peers.count - first - self.r)

    @staticmethod
    def _apart(flat: Tensor, experts: int, units: int, hidden: int) -> tuple[Tensor, ...]:
        gate, up, down = flat.split([experts * units * hidden] * 3)
        wide = (experts, units, hidden)
        return gate.view(wide), up.view(wide), down.view(experts, hidden, units)


@dataclass(frozen=True, slots=True, eq=False)
class WholeTraffic:
    """Whole experts: this rank's own, of all units, and copies of others."""

    sharing: Sharing
    """Its r is 1: each rank computes with all units."""
    copies: CopyTraffic
    own: int
    """Experts of this rank."""

    @property
    def remakes(self) -> bool:
        """Whether the backward fetches weights again."""
        return True

    def fetch(self, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Own experts and then copies, as three matrices."""
        wide = self.sharing.fetch(weights)
        more = self.copies.fetch(wide)
        return tuple(torch.cat(each) for each in zip(wide, more, strict=True))

    def give_back(
        self, grads: tuple[Tensor, ...], weights: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Gradients of the units that this rank keeps."""
        own = tuple(each[: self.own] for each in grads)
        returned = self.copies.give_back(tuple(each[self.own :] for each in grads), own)
        summed = tuple(one + more for one, more in zip(own, returned, strict=True))
        return self.sharing.give_back(summed, weights)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: Sequence[int], sharing: Sharing) -> Tensor:
        ctx.way_back = sizes, sharing
        return sharing.move_rows(rows, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sizes, sharing = ctx.way_back
        return sharing.move_sums(grads[0], sizes), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, sizes: Sequence[int], sharing: Sharing) -> Tensor:
        ctx.way_back = sizes, sharing
        return sharing.move_sums(parts, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sizes, sharing = ctx.way_back
        return sharing.move_rows(grads[0].contiguous(), sizes), None, None
