"""A batch's ids on their way to the ranks of their rows, one stage at a time.

Why
    Ids depend on no weight, so they may travel while an earlier step computes. Rows may not: a row
    that is read before an earlier step has updated it is stale.

What it decides
    Sizes, lengths and ids are three exchanges, each of which needs the one before. ``advance``
    begins the next one and returns at once; ``receive`` begins and awaits all that are left. A
    batch that nobody advanced is exchanged whole by ``receive``, with the same bytes.

Kept true (tests/multi/recsys/test_ahead.py, tests/multi/recsys/test_tables.py)
    Every id reaches each shard of its row once, in the order of (rank, sample, position), whenever
    it travels; bytes are counted when the batch is received.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.recsys.bags import Bags, split_bags
from equipoise.recsys.exchange import TableExchange, TableSwap, as_bytes
from equipoise.recsys.jagged import KeyedJagged, require_ids
from equipoise.recsys.sessions.inverse import InverseJagged
from equipoise.schedule.tables.placement import TablePlan

Batch = KeyedJagged | InverseJagged


@dataclass(slots=True, eq=False)
class Delivered:
    """A batch whose ids have reached the ranks of their rows."""

    batch: Batch
    by_table: Mapping[str, Bags]
    """This rank's own bags of each table."""
    sizes: dict[str, list[int]]
    """For each table, bags of each rank."""
    bags: list[Bags]
    """One for each shard that this rank holds, rank after rank."""


class Delivery:
    """The ids of one rank's batch; all ranks make, advance and receive theirs in one order."""

    def __init__(self, plan: TablePlan, exchange: TableExchange, batch: Batch) -> None:
        """Check the ids and sort them by the ranks of their rows; nothing is sent.

        Raises:
            DataError: a feature is missing, or an id is beyond its table.
        """
        self.batch, self._plan, self._exchange = batch, plan, exchange
        self._by_table = {}
        for each in plan.placements:
            lengths, values = batch.bags(each.table.name)
            require_ids(each.table.name, lengths, values, each.table.rows)
            self._by_table[each.table.name] = Bags(lengths, values)
        self._sent = split_bags(plan, self._by_table, exchange.ranks)
        self._mine = [
            each.table.name
            for each in plan.placements
            if each.kind != "data"
            for _ in each.shards_on(exchange.rank)
        ]
        self._swaps: list[TableSwap] = []
        self._sizes: dict[str, list[int]] = {}
        self._lengths: list[Sequence[Tensor]] = []
        self._counts: list[list[int]] = []
        self._begun = 0.0
        self.travel_s = self.waited_s = 0.0
        """Seconds from the first exchange to the last one's end, and those spent in calls here."""

    def advance(self) -> None:
        """Begin the next exchange, once the one before has ended."""
        began = time.perf_counter()
        match len(self._swaps):
            case 0:
                self._begun = began
                self._send_sizes()
            case 1:
                self._send_lengths()
            case 2:
                self._send_ids()
        self.waited_s += time.perf_counter() - began

    def receive(self) -> Delivered:
        """Begin and await what is left; count all three exchanges."""
        while len(self._swaps) < 3:
            self.advance()
        began = time.perf_counter()
        arrived = self._exchange.end(self._swaps[2])
        for swap in self._swaps:
            self._exchange.count(swap)
        ids_R = [
            part.view(torch.int64).split(counts)
            for part, counts in zip(arrived, self._counts, strict=True)
        ]
        bags = [
            Bags(
                torch.cat([lengths[shard] for lengths in self._lengths]),
                torch.cat([ids[shard] for ids in ids_R]),
            )
            for shard in range(len(self._mine))
        ]
        now = time.perf_counter()
        self.waited_s += now - began
        self.travel_s = now - self._begun
        return Delivered(self.batch, self._by_table, self._sizes, bags)

    def _send_sizes(self) -> None:
        like = self.batch.values
        own = torch.tensor(self.batch.group_rows, dtype=torch.int64, device=like.device)
        ranks, block = self._exchange.ranks, own.view(torch.uint8)
        self._swaps.append(
            self._exchange.begin("sizes", [block] * ranks, [len(block)] * ranks),
        )

    def _send_lengths(self) -> None:
        parts = self._exchange.end(self._swaps[0])
        sizes_RG = [part.view(torch.int64).tolist() for part in parts]
        self._sizes = {
            each.table.name: [row[self.batch.group_of(each.table.name)] for row in sizes_RG]
            for each in self._plan.placements
        }
        blocks = [
            as_bytes([lengths for lengths, _ in parts], self.batch.values) for parts in self._sent
        ]
        expected = [4 * sum(row) for row in self._bags_RS()]
        self._swaps.append(self._exchange.begin("lengths", blocks, expected))

    def _send_ids(self) -> None:
        arrived = self._exchange.end(self._swaps[1])
        self._lengths = [
            part.view(torch.int32).split(row)
            for part, row in zip(arrived, self._bags_RS(), strict=True)
        ]
        self._counts = [[int(part.sum()) for part in parts] for parts in self._lengths]
        blocks = [as_bytes([ids for _, ids in parts], self.batch.values) for parts in self._sent]
        expected = [8 * sum(counts) for counts in self._counts]
        self._swaps.append(self._exchange.begin("ids", blocks, expected))

    def _bags_RS(self) -> list[list[int]]:
        """Bags of each rank for each of this rank's shards."""
        ranks = range(self._exchange.ranks)
        return [[self._sizes[name][peer] for name in self._mine] for peer in ranks]
