"""One rank's part of an iteration: its rows through the layers, its keys and values in its pool.

What it decides
    Nothing. Who computes which new token follows from ``plan``, what moves between ranks from the
    strategy that rank 0 names; attention is the executor's that trains. A rank keeps the keys and
    values of the tokens that it computed, in the order in which it did, so its first rows of a
    sequence are its keys of it. For single tokens ``gathered`` does the executor's work in a few
    calls. (In the invariant mode, ``ordered`` says who computes which.) ::

        tokens of a sequence   0 1 2 3 4 5 6 7 | 8 9 10 11 | 12
        rank 0, its rows       0 1 6 7           8 11        12
        rank 1, its rows       2 3 4 5           9 10

Kept true (tests/multi/serve/test_longctx.py)
    Logits are those of one process; ranks have equally many rows of every sequence, within one;
    bytes between ranks are those of the schedule.

Shapes: t this rank's new tokens, D model width, H query heads, G key/value heads, E head width.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.balance.context.continued import ContinuedPlan
from equipoise.base.arrays import Ints
from equipoise.comm.drive import drive
from equipoise.comm.mail import Parcel
from equipoise.comm.steps import pack
from equipoise.nn.rope import rotary_frequencies, rotary_table
from equipoise.parallel.context.forward import Forward
from equipoise.parallel.context.program import compile_rank
from equipoise.serve.engine.chunks.rows import tile_attention
from equipoise.serve.engine.fused import FusedDecoder, ServedDecoder, decoder_layers
from equipoise.serve.engine.pool import KvPool
from equipoise.serve.engine.tiles import run_layer
from equipoise.serve.longctx.gathered import GatheredAttention
from equipoise.serve.longctx.mail import RankMail
from equipoise.serve.longctx.message import RankWork, Text
from equipoise.serve.longctx.ordered import OrderedAttention, rows_by_position
from equipoise.serve.longctx.plan import IterationPlan, plan_iteration


class RankPart:
    """A rank's weights, its pool, and its links to the other ranks."""

    def __init__(self, decoder: ServedDecoder, pool: KvPool, mail: RankMail) -> None:
        if isinstance(decoder, FusedDecoder):
            decoder.pack()
        self.decoder, self.pool, self.mail = decoder, pool, mail
        self.attend = tile_attention(pool)
        """Computes a tile of the executor's."""
        self.attention_s = 0.0
        """Time in attention, waits included, in the iteration that ran last [s]."""
        self._frequency = rotary_frequencies(decoder.model, device=pool.device)

    @torch.no_grad()
    def run(self, work: RankWork, plan: IterationPlan | None = None) -> Tensor | None:
        """Compute this rank's rows of an iteration; every rank calls it with the same work.

        Args:
            work: What to compute.
            plan: Who computes what, if it was made already.

        Returns:
            On rank 0 hidden states before the last norm, of all new tokens [tokens, D]: those
            that ``logits`` asks for, and NaN for all others. None on other ranks.
        """
        for swap in work.swaps_out:
            self.pool.swap_out(swap)
        for swap in work.swaps_in:
            self.pool.swap_in(swap)
        if not work.tile_rows:
            plan = plan or self.plan(work)
        shares = self._shares(work) if plan is None else plan.rows
        rows = torch.from_numpy(shares[self.mail.rank])
        starts, new = (
            np.array(x, dtype=np.int64) for x in ([t.start for t in work.texts], work.new)
        )
        first = np.cumsum(new) - new
        positions = np.arange(new.sum()) + np.repeat(starts - first, new)
        x_tD = self.decoder.begin(torch.tensor(work.tokens)[rows])
        table = rotary_table(self._frequency, torch.from_numpy(positions)[rows], x_tD.dtype)
        if plan is None:
            model = self.decoder.model
            ordered = OrderedAttention(self.pool, self.mail, work.texts)
            for number, each in enumerate(decoder_layers(self.decoder)):
                attend = partial(ordered.attend, number)
                x_tD = run_layer(each, model, work.tile_rows, x_tD, table, attend)
            return self._collect(work, shares, x_tD)
        attention = _Attention(self, work, plan)
        for number, layer in enumerate(self.decoder.layers):
            x_tD = layer(x_tD, table, partial(attention.attend, number))
        self.attention_s = attention.seconds
        return self._collect(work, shares, x_tD)

    def counts(self) -> dict[str, Any]:
        """What this rank has sent to each, the bytes of its pool, and its processor time [s]."""
        return {
            "sent": self.mail.ledger.sent_bytes.tolist(),
            "pool": self.pool.size_bytes,
            "core_s": time.process_time(),
        }

    def plan(self, work: RankWork) -> IterationPlan:
        """Who computes what; the same on every rank."""
        model = self.decoder.model
        return plan_iteration(work, heads=model.heads, kv_heads=model.kv_heads)

    def _shares(self, work: RankWork) -> tuple[Ints, ...]:
        """The rows of each rank in the invariant mode."""
        return rows_by_position(work.texts, self.pool.page_tokens, self.mail.ranks)

    def _collect(self, work: RankWork, shares: Sequence[Ints], x_tD: Tensor) -> Tensor | None:
        """Send rank 0 the rows whose logits it needs."""
        stops = np.cumsum(work.new)
        needed = np.concatenate(
            [
                np.arange(stop - text.logits, stop)
                for stop, text in zip(stops, work.texts, strict=True)
            ]
        )
        mail = self.mail
        mine = [np.flatnonzero(np.isin(rows, needed)) for rows in shares]
        if mail.rank:
            own = torch.from_numpy(mine[mail.rank])
            sends = [Parcel(0, 0, pack([x_tD[own]]), 0)] if len(own) else []
            mail.post(sends, [])
            mail.wait(0)
            return None
        out_TD = x_tD.new_full((int(stops[-1]), x_tD.shape[1]), torch.nan)
        arriving = {
            rank: x_tD.new_empty(len(at), x_tD.shape[1])
            for rank, at in enumerate(mine)
            if rank and len(at)
        }
        mail.post(
            [], [Parcel(rank, 0, x.view(-1).view(torch.uint8), 0) for rank, x in arriving.items()]
        )
        mail.wait(0)
        for rank, at in enumerate(mine):
            if len(at):
                given = arriving[rank] if rank else x_tD[torch.from_numpy(at)]
                out_TD[torch.from_numpy(shares[rank][at])] = given
        return out_TD


class _Attention:
    """The attention of one iteration on one rank, called once for each layer."""

    def __init__(self, part: RankPart, work: RankWork, plan: IterationPlan) -> None:
        self.seconds = 0.0
        self._kinds: list[tuple[slice, _TileAttention | GatheredAttention]] = []
        first, pool, mail = 0, part.pool, part.mail
        for each in plan:
            texts = [work.texts[at] for at in each.texts.tolist()]
            span = slice(first, first + len(each.plan.rows[mail.rank]))
            first = span.stop
            attention = (
                GatheredAttention(pool, mail, texts, each.plan.rows)
                if each is plan.single
                else _TileAttention(part, texts, each.plan)
            )
            self._kinds.append((span, attention))

    def attend(self, layer: int, q_tHE: Tensor, k_tGE: Tensor, v_tGE: Tensor) -> Tensor:
        """Keep the new keys and values, and attend over all ranks: outputs [t, H, E]."""
        begin_s = time.perf_counter()
        parts = [
            attention.attend(layer, q_tHE[span], k_tGE[span], v_tGE[span])
            for span, attention in self._kinds
        ]
        self.seconds += time.perf_counter() - begin_s
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _TileAttention:
    """The attention of some texts on one rank by the executor, called once for each layer."""

    def __init__(self, part: RankPart, texts: Sequence[Text], plan: ContinuedPlan) -> None:
        self._pool, self._mail, self._attend = part.pool, part.mail, part.attend
        rank = self._mail.rank
        self._program = compile_rank(plan.schedule, rank, part.pool.device)
        stored, self._keys = list[int](), list[slice]()
        counts: Ints = plan.key_tokens[rank]
        for text, after in zip(texts, counts.tolist(), strict=True):
            pages = [page for run in text.runs for page in range(run.first, run.first + run.pages)]
            stored += part.pool.row_numbers(pages, text.cached[rank], after)
            self._keys += part.pool.views(text.runs, after)
        self._stored_t = torch.tensor(stored, dtype=torch.int64, device=part.pool.device)

    def attend(self, layer: int, q_tHE: Tensor, k_tGE: Tensor, v_tGE: Tensor) -> Tensor:
        """Keep the new keys and values, and attend over all ranks: outputs [t, H, E]."""
        keys, values = self._pool.keys(layer), self._pool.values(layer)
        keys[self._stored_t], values[self._stored_t] = k_tGE, v_tGE
        read = self._read(keys), self._read(values)
        executor = Forward(self._program, q_tHE, *read, attend=self._attend)
        drive(executor.steps(), self._mail)
        return executor.output

    def _read(self, rows_SGE: Tensor) -> Tensor:
        """This rank's keys or values of all texts; where they lie in a row, without copying."""
        if len(self._keys) == 1:
            return rows_SGE[self._keys[0]]
        parts = [rows_SGE[each] for each in self._keys]
        return torch.cat(parts) if parts else rows_SGE[:0]
