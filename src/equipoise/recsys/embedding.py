"""Embedding tables over ranks: one executor of every plan, whose maths no plan changes.

Why
    Elsewhere the plan leaks into the model: pooled features come back in another order, row-wise
    AdaGrad keeps one state for each column shard, data-parallel tables ignore the optimizer that
    was asked for. Here a plan says where rows lie, and nothing else.

What it decides
    A step's stages are those of ``schedule.tables.traffic``: bags travel to the ranks of their
    rows, are summed there, and the sums travel back; gradients go the same ways in the other
    direction. Sums are taken in the order of (shard, rank, sample, position). Outputs stand in the
    order of the tables. ``step`` applies each row's whole gradient once::

        out = tables(batch)                  # [B, sum of widths]
        (loss_sum / global_batch).backward()
        tables.step()

    A forward without gradients (``torch.no_grad``) leaves nothing for ``step``.

Kept true (tests/multi/recsys/test_tables.py)
    Every plan x optimizer x pooling equals one process, on 2 and 4 ranks, with empty bags,
    duplicates, all ids on one rank, and batches of different sizes; two runs are equal to the bit.

Sources
    Neo, arXiv:2104.05158, sections 4.1 and 4.2.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.base.shown import counted, shown
from equipoise.recsys.ahead.delivery import Batch, Delivered, Delivery
from equipoise.recsys.exchange import TableExchange, as_bytes
from equipoise.recsys.optimizer import SparseStep, sum_rows
from equipoise.recsys.returns import Returns
from equipoise.recsys.shard import RowKeeping, TableShard, make_shard
from equipoise.schedule.tables.placement import TablePlan
from equipoise.schedule.tables.traffic import WIRES, Wire


class ShardedTables:
    """This rank's shards of all tables of a plan."""

    def __init__(
        self,
        plan: TablePlan,
        exchange: TableExchange,
        step: SparseStep,
        *,
        seed: int = 0,
        forward: Wire = "fp32",
        backward: Wire = "fp32",
        device: torch.device | None = None,
        kept: RowKeeping | None = None,
    ) -> None:
        """Draw this rank's weights.

        Args:
            plan: Where tables lie.
            exchange: Among as many ranks as the plan has.
            step: The sparse optimizer of all tables.
            seed: Of the first weights.
            forward: How pooled rows travel.
            backward: How their gradients travel.
            device: Where weights lie; the CPU unless given.
            kept: Rows in few bits, or in a file, behind a cache; fp32 in memory unless given.

        Raises:
            LayoutError: the plan is of another number of ranks, or divides rows of few bits; or
                there is no such wire format.
        """
        if plan.ranks != exchange.ranks:
            raise LayoutError(
                f"The tables are planned for {counted(plan.ranks, 'rank')}; "
                f"{exchange.ranks:,} joined. Plan them for {exchange.ranks:,}."
            )
        for wire in (forward, backward):
            if wire not in WIRES:
                raise LayoutError(f"{shown(wire)} is not one of {', '.join(WIRES)}.")
        if not 0 <= seed < 1 << 64:
            raise LayoutError(f"A seed of {seed} cannot be. Give one from 0 to 2^64 - 1.")
        self.plan, self.exchange, self.optimizer = plan, exchange, step
        self.forward_wire, self.backward_wire = forward, backward
        self.device = device or torch.device("cpu")
        self.number = 0
        """Steps done."""
        rank = exchange.rank
        self.shards = [
            make_shard(each, shard, step, seed, self.device, kept)
            for each in plan.placements
            if each.kind != "data"
            for shard in each.shards_on(rank)
        ]
        self.copies = [
            make_shard(each, 0, step, seed, self.device, kept)
            for each in plan.placements
            if each.kind == "data"
        ]
        self._gradients: list[tuple[TableShard, Tensor, Tensor]] | None = None
        self._returns = Returns(plan, exchange, forward, backward)
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        self.ids_received: dict[str, Ints] = {}
        """Ids of each of this rank's shards in the last forward, by the rank they came from."""

    @property
    def width(self) -> int:
        """Floats of an output row: all vectors side by side."""
        return sum(each.width for each in self.plan.outputs)

    def held(self) -> Iterator[TableShard]:
        """Every shard and copy on this rank."""
        yield from self.shards
        yield from self.copies

    def floats(self) -> Iterator[Tensor]:
        """This rank's weights, or those in slots where rows lie behind a cache."""
        for shard in self.held():
            yield shard.weight if shard.held is None else shard.held.values

    def deliver(self, batch: Batch) -> Delivery:
        """A batch whose ids may travel early; arguments are those of the call."""
        return Delivery(self.plan, self.exchange, batch)

    def __call__(self, batch: Batch | Delivery) -> Tensor:
        """Pool every table for this rank's samples; all ranks call it together.

        Args:
            batch: Ids of this rank's samples, with a feature for each table; ranks may have
                different numbers of samples, also none. Rows that samples share are looked up and
                exchanged once; all ranks group the same features. A ``Delivery`` may have begun.

        Returns:
            float32 [B, sum of widths], in the order of the plan's tables.

        Raises:
            DataError: a feature is missing, or an id is beyond its table.
            LayoutError: a gradient waits for ``step``.
        """
        if torch.is_grad_enabled() and self._gradients is not None:
            raise LayoutError(
                "The tables have a gradient that no step has applied. Call step() before the next "
                "forward, or forward under torch.no_grad()."
            )
        delivery = batch if isinstance(batch, Delivery) else self.deliver(batch)
        passed, is_training = delivery.receive(), torch.is_grad_enabled()
        out: Tensor = _Pooled.apply(self._anchor, self, passed, is_training)
        return out

    def forward(self, passed: Delivered, *, is_training: bool) -> Tensor:
        """Pool ids that have arrived; arguments are those of ``look_up``."""
        sums = self.look_up(passed, is_training=is_training)
        out = dict(self._returns.send_sums(self.shards, sums, passed.sizes))
        for copy in self.copies:
            own = passed.by_table[copy.table.name]
            out[copy.table.name] = copy.pool(own.ids, own.lengths, is_training=is_training)
        columns = []
        for each in self.plan.placements:
            name = each.table.name
            rows = scale_sums(out[name], passed.by_table[name].lengths, each.table.pooling)
            columns.append(passed.batch.expand(name, rows))
        return torch.cat(columns, dim=1)

    def look_up(self, passed: Delivered, *, is_training: bool) -> list[Tensor]:
        """Sum the rows of bags that have arrived.

        Args:
            passed: A batch whose ids are where their rows lie.
            is_training: Whether a backward follows.

        Returns:
            For each shard here, float32 [bags of all ranks, columns].
        """
        self.ids_received = {
            f"{shard.table.name}:{shard.index}": each.count_by_rank(passed.sizes[shard.table.name])
            for shard, each in zip(self.shards, passed.bags, strict=True)
        }
        return [
            shard.pool(each.ids, each.lengths, is_training=is_training)
            for shard, each in zip(self.shards, passed.bags, strict=True)
        ]

    def backward(self, grad: Tensor, passed: Delivered) -> None:
        """Bring the outputs' gradients to the rows; ``step`` applies them."""
        by_table: dict[str, Tensor] = {}
        begin = 0
        for each in self.plan.placements:
            lengths, _ = passed.batch.bags(each.table.name)
            part = passed.batch.fold(each.table.name, grad[:, begin : begin + each.table.width])
            by_table[each.table.name] = scale_sums(part, lengths, each.table.pooling)
            begin += each.table.width
        arrived = self._returns.send_gradients(self.shards, by_table, passed.sizes)
        self.keep_gradients(arrived, by_table, passed)

    def keep_gradients(
        self, arrived: list[Tensor], by_table: dict[str, Tensor], passed: Delivered
    ) -> None:
        """Sum by row what arrived for each shard's bags, and what copies have for this rank's.

        Raises:
            LayoutError: the gradients of another backward wait for ``step``.
        """
        if self._gradients is not None:
            raise LayoutError(
                "The tables have the gradient of another backward, and one more would replace it. "
                "Look up all samples of a step in one forward, and call step() after its backward."
            )
        self._gradients = [
            (shard, *sum_rows(bags.ids, bags.lengths, pooled))
            for shard, bags, pooled in zip(self.shards, passed.bags, arrived, strict=True)
        ]
        self._gradients += self._sum_copies(by_table, passed)

    def step(self, lr: float | None = None) -> None:
        """Apply each row's gradient once; all ranks call it together after a backward.

        Args:
            lr: Learning rate of this step; the optimizer's unless given.

        Raises:
            LayoutError: there is no gradient.
        """
        if self._gradients is None:
            raise LayoutError(
                "The tables have no gradient to apply. Call backward() on a loss of their output "
                "before step()."
            )
        step = self.optimizer if lr is None else dataclasses.replace(self.optimizer, lr=lr)
        self.number += 1
        squares = self._squares() if step.name == "row-wise-adagrad" else {}
        for shard, rows, grad in self._gradients:
            shared = squares.get(shard.table.name)
            shard.apply(step, rows, grad, number=self.number, squares=shared)
        self._gradients = None

    def parts(self) -> dict[str, dict[str, Any]]:
        """States that this rank saves besides its shards, by name."""
        return {}

    def part_names(self) -> list[str]:
        """Names of such states over all ranks."""
        return []

    def load_parts(self, read: Callable[[str], Mapping[str, Any]]) -> None:
        """Take the states that this rank needs from a checkpoint."""

    def _squares(self) -> dict[str, Tensor]:
        """Mean squared gradient of each touched row over all column shards, by table.

        Shards of a table have the same rows, so vectors are summed shard by shard.
        """
        own = {
            (shard.table.name, shard.index): (grad * grad).sum(dim=1)
            for shard, _, grad in self._gradients or ()
            if shard.placement.kind == "column"
        }
        if not any(each.kind == "column" for each in self.plan.placements):
            return {}
        rank, ranks = self.exchange.rank, range(self.exchange.ranks)
        tables = [each for each in self.plan.placements if each.kind == "column"]
        like = self._anchor.detach()
        blocks = [
            as_bytes(
                [
                    own[each.table.name, shard]
                    for each in tables
                    if peer in each.ranks
                    for shard in each.shards_on(rank)
                ],
                like,
            )
            for peer in ranks
        ]
        mine = {name: len(vector) for (name, _), vector in own.items()}
        expected = [
            sum(
                4 * mine[each.table.name] * len(each.shards_on(peer))
                for each in tables
                if rank in each.ranks
            )
            for peer in ranks
        ]
        parts = [
            part.view(torch.float32) for part in self.exchange.swap("squares", blocks, expected)
        ]
        taken = [0] * len(parts)
        sums: dict[str, Tensor] = {}
        for each in tables:
            name = each.table.name
            if rank not in each.ranks:
                continue
            vectors: dict[int, Tensor] = {}
            for peer in ranks:
                for shard in each.shards_on(peer):
                    begin = taken[peer]
                    taken[peer] += mine[name]
                    vectors[shard] = parts[peer][begin : taken[peer]]
            total = torch.zeros_like(vectors[0])
            for shard in range(len(each.ranks)):
                total = total + vectors[shard]
            sums[name] = total / each.table.width
        return sums

    def _sum_copies(
        self, by_table: dict[str, Tensor], passed: Delivered
    ) -> list[tuple[TableShard, Tensor, Tensor]]:
        """Every rank's row gradients of data-parallel tables, summed in the order of the ranks."""
        if not self.copies:
            return []
        own = []
        for copy in self.copies:
            lengths, ids = passed.batch.bags(copy.table.name)
            own.append(sum_rows(ids, lengths, by_table[copy.table.name]))
        ranks = self.exchange.ranks
        counts = torch.tensor([len(rows) for rows, _ in own], dtype=torch.int64)
        head = counts.to(self.device).view(torch.uint8)
        heads = self.exchange.swap("replicas", [head] * ranks, [len(head)] * ranks)
        counts_R = [part.view(torch.int64).tolist() for part in heads]
        whole = as_bytes([rows for rows, _ in own] + [grad for _, grad in own], head)
        widths = [copy.table.width for copy in self.copies]
        expected = [
            sum(count * (8 + 4 * width) for count, width in zip(row, widths, strict=True))
            for row in counts_R
        ]
        parts = self.exchange.swap("replicas", [whole] * ranks, expected)
        rows_R, grads_R = [], []
        for part, row in zip(parts, counts_R, strict=True):
            rows_R.append(part[: 8 * sum(row)].view(torch.int64).split(row))
            flat = part[8 * sum(row) :].view(torch.float32)
            sizes = [count * width for count, width in zip(row, widths, strict=True)]
            grads_R.append(flat.split(sizes))
        summed = []
        for index, copy in enumerate(self.copies):
            rows = torch.cat([each[index] for each in rows_R])
            grads = torch.cat([each[index] for each in grads_R]).view(-1, widths[index])
            summed.append((copy, *sum_rows(rows, torch.ones_like(rows), grads)))
        return summed


def scale_sums(pooled: Tensor, lengths: Tensor, pooling: str) -> Tensor:
    """Sums of bags, or gradients of them, float32 [bags, W], as the table pools."""
    if pooling == "sum":
        return pooled
    return pooled / lengths.clamp(min=1).unsqueeze(1)


class _Pooled(torch.autograd.Function):
    """The tables' forward; its backward hands gradients to the tables, not to a tensor."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tables: ShardedTables, passed: Delivered, is_training: bool
    ) -> Tensor:
        del anchor
        ctx.tables, ctx.passed = tables, passed
        return tables.forward(passed, is_training=is_training)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        ctx.tables.backward(grads[0].contiguous(), ctx.passed)
        return None, None, None, None


def resident_rows(tables: ShardedTables) -> dict[str, int]:
    """Rows of each table on this rank."""
    held: dict[str, int] = {}
    for shard in tables.held():
        held[shard.table.name] = held.get(shard.table.name, 0) + shard.count
    return held


def whole_table(shards: list[tuple[Ints, tuple[int, int], np.ndarray]], rows: int) -> np.ndarray:
    """A table put together from ``(rows, columns, weights)`` of all its shards."""
    width = max(end for _, (_, end), _ in shards)
    table = np.full((rows, width), np.nan, dtype=np.float32)
    for held, (begin, end), weight in shards:
        table[held, begin:end] = weight
    return table
