"""The executor's forward pass: a rank's part of any attention schedule.

What it decides
    Outputs are merged in fp32 (fp64 if tensors are) in the order of the schedule: rounds, then
    tiles, then messages as listed. A rerun is equal bit for bit. Received queries, keys and
    values are kept for the backward pass.

    A sink is added where an output over all keys is complete: on the rank of the query, or on
    the one that computes the query's head and sends the output there.

Kept true (tests/unit/parallel/test_context.py, tests/multi/parallel/test_context.py)
    Every schedule equals one rank; reruns are equal bit for bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.comm.mail import Parcel
from equipoise.comm.steps import (
    Await,
    Post,
    Sections,
    Steps,
    allocate,
    pack,
    unpack,
)
from equipoise.nn.tile import (
    AttendTile,
    attend_tile,
    attend_tiles,
    merge_tile_,
    sink_tile_,
    sum_dtype,
)
from equipoise.parallel.context.calls import TileCall
from equipoise.parallel.context.held import hold
from equipoise.parallel.context.program import RankProgram, Rows, Transfer


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Tensors that one rank holds from its forward to its backward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    """Outputs over all keys, for home queries and for those computed entirely here."""
    lse: Tensor


class Forward:
    """One rank's forward pass. ``output`` and ``kept`` exist once its steps have ended."""

    def __init__(
        self,
        program: RankProgram,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        attend: AttendTile = attend_tile,
    ) -> None:
        self.program, self.home = program, (q, k, v)
        self.softcap, self.sinks, self.attend = softcap, sinks, attend
        self.sums = sum_dtype(q.dtype)
        self.q = hold(q, program.query_rows, program.held_queries, program.held_heads)
        self.k, self.v = (
            hold(x, program.key_rows, program.held_keys, program.held_kv_heads) for x in (k, v)
        )
        # A row that no tile writes has seen no key: its log-sum-exp is minus infinity.
        self.o = torch.zeros_like(self.q, dtype=self.sums)
        self.lse = self.o.new_full(self.o.shape[:2], float("-inf"))
        self.output: Tensor
        self.kept: Kept

    def steps(self) -> Steps:
        """Run all rounds."""
        under_way: list[tuple[Transfer, Tensor]] = []
        outputs: list[tuple[Transfer, Tensor]] = []
        for at, each in enumerate(self.program.rounds):
            sends = [Parcel(t.peer, t.tag, pack(self._sent(t)), t.due) for t in each.sends]
            receives = []
            for transfer in each.receives:
                data = allocate(self._sections(transfer), self.q.device)
                receives.append(Parcel(transfer.peer, transfer.tag, data, transfer.due))
                under_way.append((transfer, data))
            yield Post(sends, receives)
            self._compute(at)
            yield Await(at)
            for transfer, data in under_way:
                if transfer.due == at:
                    self._arrive(transfer, data, outputs)
            under_way = [(t, data) for t, data in under_way if t.due > at]
        self._finish(outputs)

    def _sections(self, transfer: Transfer) -> Sections:
        shape, width = transfer.shape, self.q.shape[2]
        whole = (*shape, width)
        if transfer.carries == "partial":
            return [(whole, self.sums), (shape, self.sums)]
        return [(whole, self.q.dtype)] * (2 if transfer.carries == "kv" else 1)

    def _sent(self, transfer: Transfer) -> list[Tensor]:
        rows, heads = transfer.rows, transfer.heads
        if transfer.carries == "partial":
            return [self.o[rows, heads], self.lse[rows, heads]]
        if transfer.carries == "output":
            self._sink(rows, heads)
            return [self.o[rows, heads].to(self.q.dtype)]
        q, k, v = (self.q, self.k, self.v) if transfer.is_held else self.home
        parts = (q,) if transfer.carries == "q" else (k, v)
        return [part[rows, heads] for part in parts]

    def _compute(self, at: int) -> None:
        each = self.program.rounds[at]
        for call in each.calls:
            self._call(call)
        for tile in () if each.calls else each.tiles:
            part, lse = self.attend(
                self.q[tile.queries, tile.heads],
                self.k[tile.keys, tile.kv_heads],
                self.v[tile.keys, tile.kv_heads],
                tile.kind,
                softcap=self.softcap,
            )
            o_into = self.o[tile.queries, tile.heads]
            lse_into = self.lse[tile.queries, tile.heads]
            if tile.is_first:
                o_into.copy_(part)
                lse_into.copy_(lse)
            else:
                merge_tile_(o_into, lse_into, part, lse)

    def _call(self, call: TileCall) -> None:
        part, lse = attend_tiles(
            self.q[call.query_rows, call.heads],
            self.k[call.key_rows, call.kv_heads],
            self.v[call.key_rows, call.kv_heads],
            call.runs,
            is_causal=call.is_causal,
            softcap=self.softcap,
        )
        at = call.query_rows, call.heads
        if not call.is_first:
            o_so_far, lse_so_far = self.o[at], self.lse[at]
            merge_tile_(o_so_far, lse_so_far, part, lse)
            part, lse = o_so_far, lse_so_far
        self.o[at], self.lse[at] = part.to(self.sums), lse

    def _sink(self, rows: Rows, heads: slice) -> None:
        """Add the sinks to outputs over all keys."""
        if self.sinks is None:
            return
        o, lse = self.o[rows, heads], self.lse[rows, heads]
        sink_tile_(o, lse, self.sinks[self.program.held_heads][heads].to(self.sums))
        self.o[rows, heads], self.lse[rows, heads] = o, lse  # where rows are indices

    def _arrive(
        self, transfer: Transfer, data: Tensor, outputs: list[tuple[Transfer, Tensor]]
    ) -> None:
        parts = unpack(data, self._sections(transfer))
        rows, heads = transfer.rows, transfer.heads
        if transfer.carries == "output":
            outputs.append((transfer, parts[0]))
        elif transfer.carries == "partial":
            o, lse = self.o[rows, heads], self.lse[rows, heads]
            merge_tile_(o, lse, *parts)
            self.o[rows, heads], self.lse[rows, heads] = o, lse  # where rows are indices
        else:
            held = (self.q,) if transfer.carries == "q" else (self.k, self.v)
            for into, part in zip(held, parts, strict=True):
                into[rows, heads] = part

    def _finish(self, outputs: list[tuple[Transfer, Tensor]]) -> None:
        program, dtype = self.program, self.home[0].dtype
        self._sink(program.query_rows, slice(None))
        o = self.o.to(dtype)
        if program.holds_home_queries_alone:
            self.output = o
        else:
            self.output = torch.empty_like(self.home[0], memory_format=torch.contiguous_format)
            self.output[:, program.held_heads] = o[program.query_rows]
        for transfer, part in outputs:
            self.output[transfer.rows, transfer.heads] = part
        self.kept = Kept(self.q, self.k, self.v, o, self.lse)
