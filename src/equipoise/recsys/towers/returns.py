"""Sums of bags to the towers of their host, what towers made of them to the samples, and back.

What it decides
    Rank j of each host serves the ranks j of all hosts. Inside its host it gets the sums of all
    tables of the host's towers for the samples that it serves; modules condense them there; what
    leaves goes to the samples' ranks, one exchange among equal j. Gradients go the same ways back.
    Sums over buckets of rows are taken in the order of the shards, as without towers.

Kept true (tests/multi/recsys/test_towers.py)
    Towers that pass vectors on equal the same plan without towers to the bit; bytes inside and
    across hosts equal the formula.

Sources
    The semantic-preserving tower transform: arXiv:2403.00877, section 3.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from equipoise.recsys.bags import Bags
from equipoise.recsys.exchange import TableExchange, as_bytes
from equipoise.recsys.returns import Returns
from equipoise.recsys.shard import TableShard
from equipoise.recsys.wire import decode, encode, gradient_gain, times
from equipoise.schedule.tables.placement import TablePlacement, TablePlan, TowerPlacement
from equipoise.schedule.tables.traffic import Wire, wire_bytes
from equipoise.spec.tables.table import FLOAT_BYTES


class TowerReturns(Returns):
    """Both directions, for one rank of a plan with towers."""

    def __init__(
        self, plan: TablePlan, exchange: TableExchange, forward: Wire, backward: Wire
    ) -> None:
        super().__init__(plan, exchange, forward, backward)
        self._host = self._rank // self._local
        self.own = plan.towers_on(self._host)
        """This host's towers, each with its number."""

    def gather(
        self,
        shards: Sequence[TableShard],
        sums: Sequence[Tensor],
        bags: Sequence[Bags],
        sizes: Sequence[int],
    ) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Bring the sums of this host's tables to the ranks that serve their samples.

        Args:
            shards: This rank's.
            sums: Of each shard's bags, float32 [bags of all ranks, columns].
            bags: Of each shard; their lengths travel where a table pools by mean.
            sizes: Samples of each rank.

        Returns:
            For each table of this host, float32 [samples that this rank serves, width], and the
            lengths of their bags where it pools by mean, int32 [samples].
        """
        wire, blocks, expected = self.forward_wire, [], []
        split = [each.split(list(sizes)) for each in sums]
        lengths = [each.lengths.split(list(sizes)) for each in bags]
        count = sum(sizes[source] for source in self._served(self._rank))
        for peer in range(self.exchange.ranks):
            if not self._is_near(peer):
                blocks.append(self._pack([], wire))
                expected.append(0)
                continue
            served = self._served(peer)
            means = [
                torch.cat([lengths[at][source] for source in served])
                for at, shard in enumerate(shards)
                if _sends_lengths(shard.placement, shard.index)
            ]
            rows = [torch.cat([parts[source] for source in served]) for parts in split]
            coded = [encode(each, wire) for each in rows]
            blocks.append(as_bytes([*means, *coded], torch.empty(0)))
            expected.append(
                sum(
                    count * (wire_bytes(self._width(*each), wire) + 4 * _sends_lengths(*each))
                    for each in self._shards_of(peer)
                )
            )
        arrived = self.exchange.swap("partial", blocks, expected)
        got: dict[tuple[str, int], Tensor] = {}
        counted: dict[str, Tensor] = {}
        for peer in filter(self._is_near, range(self.exchange.ranks)):
            taken = 0
            for each, shard in self._shards_of(peer):
                if _sends_lengths(each, shard):
                    part = arrived[peer][taken : taken + 4 * count].view(torch.int32)
                    before = counted.get(each.table.name)
                    counted[each.table.name] = part if before is None else before + part
                    taken += 4 * count
            for each, shard in self._shards_of(peer):
                end = taken + count * wire_bytes(self._width(each, shard), wire)
                part = decode(arrived[peer][taken:end], self._width(each, shard), wire)
                got[each.table.name, shard] = part
                taken = end
        return {
            each.table.name: (_assemble(each, got), counted.get(each.table.name))
            for each in self._near_tables()
        }

    def send_outputs(self, outs: Mapping[int, Tensor], sizes: Sequence[int]) -> Tensor:
        """Give each sample's rank what towers made of its rows.

        Args:
            outs: For each tower of this host, float32 [samples that this rank serves, V, N].
            sizes: Samples of each rank.

        Returns:
            float32 [this rank's samples, all V, N], in the order of ``TablePlan.outputs``.
        """
        wire, mine, blocks, expected = self.forward_wire, sizes[self._rank], [], []
        served = self._served(self._rank)
        parts = {
            at: dict(zip(served, out.split([sizes[s] for s in served]), strict=True))
            for at, out in outs.items()
        }
        for peer in range(self.exchange.ranks):
            rows = [parts[at][peer].flatten(0, 1) for at, _ in self.own] if peer in served else []
            blocks.append(self._pack(rows, wire))
            towers = self._towers_of(peer) if peer in served else []
            expected.append(sum(mine * _out_bytes(tower, wire) for _, tower in towers))
        arrived = self.exchange.swap("pooled", blocks, expected)
        got: dict[int, Tensor] = {}
        for peer in served:
            taken = 0
            for at, tower in self._towers_of(peer):
                end = taken + mine * _out_bytes(tower, wire)
                rows_of = decode(arrived[peer][taken:end], tower.width, wire)
                got[at] = rows_of.view(mine, tower.vectors, tower.width)
                taken = end
        together = torch.cat([got[at] for at in range(len(self.plan.towers))], dim=1)
        return together[:, self.plan.vector_order]

    def return_outputs(self, grad_BVN: Tensor, sizes: Sequence[int]) -> dict[int, Tensor]:
        """Bring gradients of what left towers to the ranks that condensed it.

        Args:
            grad_BVN: Of what ``send_outputs`` returned.
            sizes: Samples of each rank.

        Returns:
            For each tower of this host, float32 [samples that this rank serves, V, N].
        """
        wire, blocks, expected = self.backward_wire, [], []
        served, back = self._served(self._rank), torch.argsort(torch.tensor(self.plan.vector_order))
        ends = [tower.vectors for tower in self.plan.towers]
        gain = gradient_gain(wire, sizes)
        split = times(grad_BVN[:, back], gain).split(ends, dim=1)
        for peer in range(self.exchange.ranks):
            towers = self._towers_of(peer) if peer in served else []
            rows = [split[at].flatten(0, 1) for at, _ in towers]
            blocks.append(self._pack(rows, wire))
            count = sizes[peer] if peer in served else 0
            expected.append(sum(count * _out_bytes(tower, wire) for _, tower in self.own))
        arrived = self.exchange.swap("gradients", blocks, expected)
        got: dict[int, list[Tensor]] = {at: [] for at, _ in self.own}
        for peer in served:
            taken = 0
            for at, tower in self.own:
                end = taken + sizes[peer] * _out_bytes(tower, wire)
                rows_of = decode(arrived[peer][taken:end], tower.width, wire)
                got[at].append(rows_of.view(sizes[peer], tower.vectors, tower.width))
                taken = end
        return {at: times(torch.cat(parts), 1 / gain) for at, parts in got.items()}

    def spread(
        self,
        shards: Sequence[TableShard],
        by_table: Mapping[str, Tensor],
        sizes: Sequence[int],
    ) -> list[Tensor]:
        """Give each shard of this host the gradients of all samples.

        Args:
            shards: This rank's.
            by_table: Gradients of this host's tables, float32 [samples served, width].
            sizes: Samples of each rank.

        Returns:
            For each shard, float32 [bags of all ranks, columns].
        """
        wire, blocks, expected = self.backward_wire, [], []
        widths = [self._width(shard.placement, shard.index) for shard in shards]
        gain = gradient_gain(wire, sizes)
        for peer in range(self.exchange.ranks):
            is_near = self._is_near(peer)
            rows = []
            for each, index in self._shards_of(peer) if is_near else []:
                begin, end = each.columns(index)
                rows.append(times(by_table[each.table.name][:, begin:end], gain))
            blocks.append(self._pack(rows, wire))
            count = sum(sizes[source] for source in self._served(peer)) if is_near else 0
            expected.append(sum(count * wire_bytes(width, wire) for width in widths))
        arrived = self.exchange.swap("spread", blocks, expected)
        got: dict[tuple[int, int], Tensor] = {}
        for peer in filter(self._is_near, range(self.exchange.ranks)):
            taken, served = 0, self._served(peer)
            for at, width in enumerate(widths):
                bags = [sizes[source] for source in served]
                end = taken + sum(bags) * wire_bytes(width, wire)
                shares = decode(arrived[peer][taken:end], width, wire).split(bags)
                got |= {(at, s): share for s, share in zip(served, shares, strict=True)}
                taken = end
        ranks = range(self.exchange.ranks)
        places = range(len(shards))
        whole = [torch.cat([got[at, source] for source in ranks]) for at in places]
        return [times(each, 1 / gain) for each in whole]

    def sum_modules(self, flat: Tensor) -> Tensor:
        """The sum over a host's ranks, in their order, of gradients of its modules' weights."""
        blocks, expected = [], []
        own = as_bytes([flat], flat)
        size = FLOAT_BYTES * sum(tower.weights for _, tower in self.own)
        for peer in range(self.exchange.ranks):
            blocks.append(own if self._is_near(peer) else own[:0])
            expected.append(size if self._is_near(peer) else 0)
        arrived = self.exchange.swap("towers", blocks, expected)
        total = torch.zeros_like(flat)
        for peer in filter(self._is_near, range(self.exchange.ranks)):
            total = total + arrived[peer].view(torch.float32)
        return total

    def _is_near(self, rank: int) -> bool:
        return rank // self._local == self._host

    def _towers_of(self, rank: int) -> list[tuple[int, TowerPlacement]]:
        return self.plan.towers_on(rank // self._local)

    def _shards_of(self, rank: int) -> list[tuple[TablePlacement, int]]:
        return [(each, s) for each in self.plan.placements for s in each.shards_on(rank)]

    def _near_tables(self) -> list[TablePlacement]:
        return [each for each in self.plan.placements if self._is_near(each.ranks[0])]


def _sends_lengths(placement: TablePlacement, shard: int) -> bool:
    """Whether a shard's bags have lengths that a mean needs and no other shard sends."""
    return placement.table.pooling == "mean" and placement.columns(shard)[0] == 0


def _out_bytes(tower: TowerPlacement, wire: Wire) -> int:
    return tower.vectors * wire_bytes(tower.width, wire)


def _assemble(placement: TablePlacement, got: Mapping[tuple[str, int], Tensor]) -> Tensor:
    """A table's rows from those of its shards."""
    parts = [got[placement.table.name, shard] for shard in range(len(placement.ranks))]
    if placement.kind == "column":
        return torch.cat(parts, dim=1)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
