"""Sums of bags on their way back to the samples, and gradients on theirs to the rows.

What it decides
    A shard's sums go to each sample's rank, which adds up buckets of rows in the order of the
    shards. Tables divided inside a host take two hops: rank j of the host adds up the buckets for
    the samples of every host's rank j, and sends one sum across hosts; gradients go the same way
    back. A rank's own rows are rounded to the wire's format as all others are.

Kept true (tests/multi/recsys/test_tables.py)
    Every plan equals one process; bytes equal the formulas.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from equipoise.recsys.exchange import TableExchange, as_bytes
from equipoise.recsys.shard import TableShard
from equipoise.recsys.wire import decode, encode, gradient_gain, times
from equipoise.schedule.tables.placement import TablePlacement, TablePlan
from equipoise.schedule.tables.traffic import Wire, wire_bytes

TableSizes = Mapping[str, Sequence[int]]
"""For each table, bags of each rank."""


class Returns:
    """Both directions, for one rank of a plan."""

    def __init__(
        self, plan: TablePlan, exchange: TableExchange, forward: Wire, backward: Wire
    ) -> None:
        self.plan, self.exchange = plan, exchange
        self.forward_wire, self.backward_wire = forward, backward
        self._local, self._rank = plan.per_host, exchange.rank

    def send_sums(
        self, shards: Sequence[TableShard], sums: Sequence[Tensor], sizes: TableSizes
    ) -> dict[str, Tensor]:
        """Give each rank its samples' sums.

        Args:
            shards: This rank's.
            sums: Of each shard's bags, float32 [bags of all ranks, columns].
            sizes: For each table, bags of each rank.

        Returns:
            For each table that is not data-parallel, float32 [this rank's bags, width].
        """
        wire, ranks = self.forward_wire, range(self.exchange.ranks)
        parts = {
            (shard.table.name, shard.index): each.split(list(sizes[shard.table.name]))
            for shard, each in zip(shards, sums, strict=True)
        }
        across = self._add_inside(parts, sizes)
        blocks = []
        for peer in ranks:
            rows = [
                across[each.table.name, peer]
                if each.kind == "table-row"
                else parts[each.table.name, shard][peer]
                for each, shard in self._blocks(self._rank, peer)
            ]
            blocks.append(self._pack(rows, wire))
        expected = [self._sum_bytes(peer, self._rank, sizes, wire) for peer in ranks]
        arrived = self.exchange.swap("pooled", blocks, expected)
        got: dict[tuple[str, int], Tensor] = {}
        for peer in ranks:
            taken = 0
            for each, shard in self._blocks(peer, self._rank):
                width = self._width(each, shard)
                own = sizes[each.table.name][self._rank]
                end = taken + own * wire_bytes(width, wire)
                got[each.table.name, shard] = decode(arrived[peer][taken:end], width, wire)
                taken = end
        return {
            each.table.name: self._assemble(each, got)
            for each in self.plan.placements
            if each.kind != "data"
        }

    def send_gradients(
        self, shards: Sequence[TableShard], by_table: Mapping[str, Tensor], sizes: TableSizes
    ) -> list[Tensor]:
        """Give each shard the gradients of all samples.

        Args:
            shards: This rank's.
            by_table: Gradients of this rank's bags, float32 [bags, width].
            sizes: For each table, bags of each rank.

        Returns:
            For each shard, float32 [bags of all ranks, columns].
        """
        wire, ranks = self.backward_wire, range(self.exchange.ranks)
        gains, blocks = {name: gradient_gain(wire, own) for name, own in sizes.items()}, []
        for peer in ranks:
            rows = []
            for each, shard in self._blocks(peer, self._rank):
                begin, end = each.columns(shard)
                name = each.table.name
                rows.append(times(by_table[name][:, begin:end], gains[name]))
            blocks.append(self._pack(rows, wire))
        expected = [self._sum_bytes(self._rank, peer, sizes, wire) for peer in ranks]
        arrived = self.exchange.swap("gradients", blocks, expected)
        got: dict[tuple[str, int, int], Tensor] = {}
        for peer in ranks:
            taken = 0
            for each, shard in self._blocks(self._rank, peer):
                width = self._width(each, shard)
                end = taken + sizes[each.table.name][peer] * wire_bytes(width, wire)
                got[each.table.name, shard, peer] = decode(arrived[peer][taken:end], width, wire)
                taken = end
        spread = self._spread_inside(got, sizes)
        whole = [
            torch.cat(
                [
                    spread[shard.table.name, peer]
                    if shard.placement.kind == "table-row"
                    else got[shard.table.name, shard.index, peer]
                    for peer in ranks
                ]
            )
            for shard in shards
        ]
        return [
            times(each, 1 / gains[shard.table.name])
            for each, shard in zip(whole, shards, strict=True)
        ]

    def _blocks(self, owner: int, source: int) -> list[tuple[TablePlacement, int]]:
        """What an owner sends to a source, in order: a placement and its shard (0 of two hops)."""
        blocks: list[tuple[TablePlacement, int]] = []
        for each in self.plan.placements:
            if each.kind == "table-row":
                is_served = owner % self._local == source % self._local
                if owner in each.ranks and is_served:
                    blocks.append((each, 0))
            elif each.kind != "data":
                blocks += [(each, shard) for shard in each.shards_on(owner)]
        return blocks

    @staticmethod
    def _width(placement: TablePlacement, shard: int) -> int:
        begin, end = placement.columns(shard)
        return end - begin

    def _sum_bytes(self, owner: int, source: int, sizes: TableSizes, wire: Wire) -> int:
        """Bytes of an owner's sums for a source's bags."""
        return sum(
            sizes[each.table.name][source] * wire_bytes(self._width(each, shard), wire)
            for each, shard in self._blocks(owner, source)
        )

    def _pack(self, rows: Sequence[Tensor], wire: Wire) -> Tensor:
        like = rows[0] if rows else torch.empty(0)
        return as_bytes([encode(each, wire) for each in rows], like)

    def _assemble(self, placement: TablePlacement, got: Mapping[tuple[str, int], Tensor]) -> Tensor:
        name = placement.table.name
        if placement.kind == "column":
            return torch.cat([got[name, shard] for shard in range(len(placement.ranks))], dim=1)
        total = got[name, 0]
        if placement.kind == "row":
            for shard in range(1, len(placement.ranks)):
                total = total + got[name, shard]
        return total

    def _hosted(self) -> list[TablePlacement]:
        return [each for each in self.plan.placements if each.kind == "table-row"]

    def _served(self, rank: int) -> list[int]:
        """The ranks whose samples a rank handles for its host: its own place in every host."""
        return list(range(rank % self._local, self.plan.ranks, self._local))

    def _add_inside(
        self, parts: Mapping[tuple[str, int], Sequence[Tensor]], sizes: TableSizes
    ) -> dict[tuple[str, int], Tensor]:
        """Sums over a host's buckets for the samples that this rank handles, by table and rank."""
        tables = self._hosted()
        if not tables:
            return {}
        wire, rank = self.forward_wire, self._rank
        own = [each for each in tables if rank in each.ranks]
        blocks, expected = [], []
        served = self._served(rank)
        count = {e.table.name: sum(sizes[e.table.name][s] for s in served) for e in own}
        for peer in range(self.exchange.ranks):
            with_peer = [each for each in own if peer in each.ranks]
            rows = [
                torch.cat(
                    [parts[each.table.name, each.ranks.index(rank)][s] for s in self._served(peer)]
                )
                for each in with_peer
            ]
            blocks.append(self._pack(rows, wire))
            expected.append(
                sum(count[e.table.name] * wire_bytes(e.table.width, wire) for e in with_peer)
            )
        arrived = self.exchange.swap("partial", blocks, expected)
        sums: dict[tuple[str, int], Tensor] = {}
        taken = [0] * self.exchange.ranks
        for each in own:
            total: Tensor | None = None
            size = count[each.table.name] * wire_bytes(each.table.width, wire)
            for peer in each.ranks:
                part = arrived[peer][taken[peer] : taken[peer] + size]
                taken[peer] += size
                rows_of = decode(part, each.table.width, wire)
                total = rows_of if total is None else total + rows_of
            if total is not None:
                shares = total.split([sizes[each.table.name][s] for s in served])
                sums |= {
                    (each.table.name, s): share for s, share in zip(served, shares, strict=True)
                }
        return sums

    def _spread_inside(
        self, got: Mapping[tuple[str, int, int], Tensor], sizes: TableSizes
    ) -> dict[tuple[str, int], Tensor]:
        """Gradients of all samples on each rank of a host, by table and rank of the samples."""
        tables = self._hosted()
        if not tables:
            return {}
        wire, rank = self.backward_wire, self._rank
        own = [each for each in tables if rank in each.ranks]
        served = self._served(rank)
        blocks, expected = [], []
        for peer in range(self.exchange.ranks):
            with_peer = [each for each in own if peer in each.ranks]
            rows = [torch.cat([got[each.table.name, 0, s] for s in served]) for each in with_peer]
            blocks.append(self._pack(rows, wire))
            expected.append(
                sum(
                    sum(sizes[e.table.name][s] for s in self._served(peer))
                    * wire_bytes(e.table.width, wire)
                    for e in with_peer
                )
            )
        arrived = self.exchange.swap("spread", blocks, expected)
        spread: dict[tuple[str, int], Tensor] = {}
        taken = [0] * self.exchange.ranks
        for each in own:
            for peer in each.ranks:
                serving = self._served(peer)
                bags = [sizes[each.table.name][s] for s in serving]
                size = sum(bags) * wire_bytes(each.table.width, wire)
                part = arrived[peer][taken[peer] : taken[peer] + size]
                taken[peer] += size
                shares = decode(part, each.table.width, wire).split(bags)
                spread |= {(each.table.name, s): x for s, x in zip(serving, shares, strict=True)}
        return spread
