"""Attention over ranks for texts with one new token each, in a few calls for all of them.

Why
    A generated token is one query of each text. The executor computes tile by tile and holds the
    keys that a tile reads in one piece: for single queries, its calls and copies take several times
    as long as the products.

What it decides
    The messages are those of the schedule ``gather-q``: a query goes to every rank that has keys of
    its text, and partial outputs come back. A rank computes all of its own rows in one call of the
    engine's kernel, over the pages where keys are, while queries travel; then all rows of others.
    Partial outputs are merged in the order of the ranks. ::

        rank 0   q of its texts ->   own rows    others' rows, sums ->   merge
        rank 1   q of its texts ->   own rows    others' rows, sums ->   merge

Kept true (tests/multi/serve/test_longctx.py)
    Logits are those of one process; bytes between ranks are those of the schedule.

Shapes: t this rank's texts, r rows of other ranks, H query heads, G key/value heads, E head width.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from equipoise.base.arrays import Ints
from equipoise.comm.mail import Parcel
from equipoise.comm.steps import Sections, allocate, pack, unpack
from equipoise.nn.tile import merge_tile_
from equipoise.serve.engine.attend import KernelRows, TextRows
from equipoise.serve.engine.pool import KvPool
from equipoise.serve.longctx.mail import RankMail
from equipoise.serve.longctx.message import Text

_QUERIES, _SUMS = 0, 1
"""Tags of the two messages of a link, and when they are awaited."""


class GatheredAttention:
    """The attention of one iteration on one rank, called once for each layer."""

    def __init__(
        self, pool: KvPool, mail: RankMail, texts: Sequence[Text], homes: Sequence[Ints]
    ) -> None:
        """Find out who asks whom.

        Args:
            pool: This rank's keys and values.
            mail: To the other ranks.
            texts: Chunks of one token.
            homes: Of each rank, the texts whose new token it computes and keeps, ascending.
        """
        self._pool, self._mail = pool, mail
        rank = mail.rank
        own, others, stored = list[TextRows](), list[TextRows](), list[int]()
        for text in (texts[at] for at in homes[rank].tolist()):
            pages, last = _pages(text), text.cached[rank]
            stored += pool.row_numbers(pages, last, last + 1)
            own.append(TextRows(np.array([len(own)]), np.array([last]), pages))
        self._stored_t = torch.tensor(stored, dtype=torch.int64)
        self._sent: dict[int, slice | Tensor] = {}
        """Own rows that each peer has keys for."""
        self._received: dict[int, slice] = {}
        """Rows of each peer that have keys here."""
        for peer, home in enumerate(homes):
            if peer == rank:
                continue
            asked = [row for row, at in enumerate(homes[rank].tolist()) if texts[at].cached[peer]]
            if asked:
                is_all = len(asked) == len(own)
                self._sent[peer] = slice(0, len(own)) if is_all else torch.tensor(asked)
            first = len(others)
            for text in (texts[at] for at in home.tolist()):
                if count := text.cached[rank]:
                    row = TextRows(np.array([len(others)]), np.array([count - 1]), _pages(text))
                    others.append(row)
            if len(others) > first:
                self._received[peer] = slice(first, len(others))
        self._own = KernelRows(own, pool.page_rows) if own else None
        self._others = KernelRows(others, pool.page_rows) if others else None
        self._rows = len(others)

    def attend(self, layer: int, q_tHE: Tensor, k_tGE: Tensor, v_tGE: Tensor) -> Tensor:
        """Keep the new keys and values, and attend over all ranks: outputs [t, H, E]."""
        keys, values = self._pool.keys(layer), self._pool.values(layer)
        keys[self._stored_t], values[self._stored_t] = k_tGE, v_tGE
        q_rHE = q_tHE.new_empty(self._rows, *q_tHE.shape[1:])
        sends = {peer: q_tHE[rows] for peer, rows in self._sent.items()}
        self._post(_QUERIES, sends, {peer: q_rHE[rows] for peer, rows in self._received.items()})
        o_tHE, lse_tH = q_tHE.float(), q_tHE.new_empty(q_tHE.shape[:2], dtype=torch.float32)
        if self._own is not None:
            o_tHE, lse_tH = self._own.sums(q_tHE, keys, values)
        self._mail.wait(_QUERIES)
        sums = dict[int, Tensor]()
        if self._others is not None:
            o_rHE, lse_rH = self._others.sums(q_rHE, keys, values)
            for peer, rows in self._received.items():
                sums[peer] = pack([o_rHE[rows], lse_rH[rows]])
        sections = {peer: _sections(o_tHE[rows]) for peer, rows in self._sent.items()}
        arriving = {peer: allocate(each, q_tHE.device) for peer, each in sections.items()}
        self._post(_SUMS, sums, arriving)
        self._mail.wait(_SUMS)
        for peer, own in self._sent.items():
            o, lse = o_tHE[own], lse_tH[own]
            merge_tile_(o, lse, *unpack(arriving[peer], sections[peer]))
            o_tHE[own], lse_tH[own] = o, lse  # where they are indices
        return o_tHE.to(q_tHE.dtype)

    def _post(self, tag: int, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
        out, back = (
            [Parcel(peer, tag, x.view(-1).view(torch.uint8), tag) for peer, x in each.items()]
            for each in (sends, receives)
        )
        self._mail.post(out, back)


def _pages(text: Text) -> list[int]:
    return [page for run in text.runs for page in range(run.first, run.first + run.pages)]


def _sections(o_rHE: Tensor) -> Sections:
    return [(tuple(o_rHE.shape), o_rHE.dtype), (tuple(o_rHE.shape[:2]), o_rHE.dtype)]
