"""The executor's backward pass: the rounds in reverse order, every message the other way.

What it decides
    Gradients are summed in fp32 (fp64 if tensors are) in a fixed order: rounds from last to
    first, and in each the tiles, then the gradients that came back, as listed. Whatever a rank
    forwarded comes back through it, with its own part added. Scores are recomputed from the
    log-sum-exp over all keys, so each tile's gradients are exact by themselves. A sink's gradient
    is summed where its outputs were completed; those of all ranks add up to the whole.

Kept true (tests/unit/parallel/test_context.py, tests/multi/parallel/test_context.py)
    Gradients of every schedule equal those of one rank; reruns are equal bit for bit.

Sources
    The backward pass of parts by the log-sum-exp over all keys: Ring Attention,
    arXiv:2310.01889.
"""

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
    attend_tile_backward,
    attend_tiles_backward,
    sink_gradient,
    sum_dtype,
)
from equipoise.parallel.context.calls import TileCall
from equipoise.parallel.context.forward import Kept
from equipoise.parallel.context.held import add_rows, hold
from equipoise.parallel.context.program import RankProgram, Transfer


class Backward:
    """One rank's backward pass. ``gradients`` exist once its steps have ended."""

    def __init__(
        self,
        program: RankProgram,
        kept: Kept,
        grad_o: Tensor,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        self.program, self.kept, self.home_grad_o = program, kept, grad_o
        self.softcap, self.sinks = softcap, sinks
        self.grad_sinks: Tensor | None = None
        self.sums, self.dtype = sum_dtype(grad_o.dtype), grad_o.dtype
        self.o, self.lse = kept.o, kept.lse
        if any(t.carries == "partial" for each in program.rounds for t in each.sends):
            # Rows of other ranks' queries arrive before a tile reads them. The tensors of the
            # forward pass stay as they are: it may be gone back over again.
            self.o, self.lse = kept.o.clone(), kept.lse.clone()
        self.grad_o = hold(grad_o, program.query_rows, program.held_queries, program.held_heads)
        self.sums_of = {
            "q": [torch.zeros_like(kept.q, dtype=self.sums)],
            "kv": [torch.zeros_like(x, dtype=self.sums) for x in (kept.k, kept.v)],
        }
        # Gradients of heads that are not held come home to rows of their own.
        width = grad_o.shape[2]
        self.home_sums_of = {
            kind: [grad_o.new_zeros(tokens, heads, width, dtype=self.sums) for _ in sums]
            for kind, tokens, heads, held in (
                ("q", program.home_tokens, program.heads, program.held_heads),
                ("kv", program.key_tokens, program.kv_heads, program.held_kv_heads),
            )
            if held != slice(0, heads)
            for sums in [self.sums_of[kind]]
        }
        self.gradients: tuple[Tensor, ...]

    def steps(self) -> Steps:
        """Run all rounds."""
        rounds = self.program.rounds
        under_way: list[tuple[Transfer, Tensor]] = []
        for at in reversed(range(len(rounds))):
            # What ended with this round in the forward pass begins with it now.
            back = [t for each in rounds[: at + 1] for t in each.receives if t.due == at]
            awaited = [t for each in rounds[: at + 1] for t in each.sends if t.due == at]
            data = [(t, allocate(self._sections(t), self.grad_o.device)) for t in awaited]
            under_way += data
            yield Post(
                [Parcel(t.peer, t.tag, pack(self._returned(t)), t.posted) for t in back],
                [Parcel(t.peer, t.tag, buffer, t.posted) for t, buffer in data],
            )
            self._compute(at)
            yield Await(at)
            for transfer, buffer in under_way:
                if transfer.posted == at:
                    self._arrive(transfer, buffer)
            under_way = [(t, buffer) for t, buffer in under_way if t.posted < at]
        self.gradients = self._finish()
        if self.sinks is not None:
            self.grad_sinks = self._finish_sinks(self.sinks)

    def _sections(self, transfer: Transfer) -> Sections:
        whole = (*transfer.shape, self.grad_o.shape[2])
        if transfer.carries == "partial":
            return [(transfer.shape, self.sums), (whole, self.dtype), (whole, self.dtype)]
        if transfer.carries == "output":
            return [(whole, self.dtype)]
        return [(whole, self.sums)] * len(self.sums_of[transfer.carries])

    def _returned(self, transfer: Transfer) -> list[Tensor]:
        rows, heads = transfer.rows, transfer.heads
        if transfer.carries == "partial":
            return [x[rows, heads] for x in (self.lse, self.o, self.grad_o)]
        if transfer.carries == "output":
            return [self.home_grad_o[rows, heads]]
        return [x[rows, heads] for x in self.sums_of[transfer.carries]]

    def _compute(self, at: int) -> None:
        (sum_q,), (sum_k, sum_v) = self.sums_of["q"], self.sums_of["kv"]
        each = self.program.rounds[at]
        for call in each.calls:
            self._call(call)
        for tile in () if each.calls else each.tiles:
            queries, keys = tile.queries, tile.keys
            grad_q, grad_k, grad_v = attend_tile_backward(
                self.grad_o[queries, tile.heads],
                self.kept.q[queries, tile.heads],
                self.kept.k[keys, tile.kv_heads],
                self.kept.v[keys, tile.kv_heads],
                self.o[queries, tile.heads],
                self.lse[queries, tile.heads],
                tile.kind,
                softcap=self.softcap,
            )
            add_rows(sum_q, queries, tile.heads, grad_q)
            add_rows(sum_k, keys, tile.kv_heads, grad_k)
            add_rows(sum_v, keys, tile.kv_heads, grad_v)

    def _call(self, call: TileCall) -> None:
        queries, keys = (call.query_rows, call.heads), (call.key_rows, call.kv_heads)
        grads = attend_tiles_backward(
            self.grad_o[queries],
            self.kept.q[queries],
            self.kept.k[keys],
            self.kept.v[keys],
            self.o[queries],
            self.lse[queries],
            call.runs,
            is_causal=call.is_causal,
            softcap=self.softcap,
        )
        sums = *self.sums_of["q"], *self.sums_of["kv"]
        for x, at, grad in zip(sums, (queries, keys, keys), grads, strict=True):
            x[at] += grad  # rows are distinct, so nothing is lost

    def _arrive(self, transfer: Transfer, data: Tensor) -> None:
        parts = unpack(data, self._sections(transfer))
        rows, heads = transfer.rows, transfer.heads
        if transfer.carries == "partial":
            for x, part in zip((self.lse, self.o, self.grad_o), parts, strict=True):
                x[rows, heads] = part
        elif transfer.carries == "output":
            self.grad_o[rows, heads] = parts[0]
        else:
            sums_of = self.sums_of if transfer.is_held else self.home_sums_of
            for x, part in zip(sums_of[transfer.carries], parts, strict=True):
                add_rows(x, rows, heads, part)

    def _finish(self) -> tuple[Tensor, ...]:
        program = self.program
        gradients = []
        for kind, rows, heads in (
            ("q", program.query_rows, program.held_heads),
            ("kv", program.key_rows, program.held_kv_heads),
        ):
            for at, x in enumerate(self.sums_of[kind]):
                gradient = x[rows]
                if kind in self.home_sums_of:
                    home = self.home_sums_of[kind][at]
                    home[:, heads] += gradient
                    gradient = home
                gradients.append(gradient.to(self.dtype))
        return tuple(gradients)

    def _finish_sinks(self, sinks: Tensor) -> Tensor:
        """Gradient of the sinks, from the queries and heads whose output was completed here."""
        program = self.program
        complete = [(program.query_rows, slice(None))] + [
            (t.rows, t.heads)
            for each in program.rounds
            for t in each.sends
            if t.carries == "output"
        ]
        gradient = torch.zeros_like(sinks, dtype=self.sums)
        held = gradient[program.held_heads]
        scores = sinks[program.held_heads].to(self.sums)
        for rows, heads in complete:
            grad_o, o, lse = (x[rows, heads] for x in (self.grad_o, self.o, self.lse))
            held[heads] += sink_gradient(grad_o, o, lse, scores[heads])
        return gradient.to(sinks.dtype)
