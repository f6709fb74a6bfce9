"""Attention over ranks in the invariant mode: keys go to whoever reads them, in their order.

Why
    What several ranks have summed by themselves and merged has other bits than one sum. Where a
    row reads all of its keys in the order of its sequence, by the kernel of one process, its bits
    are those of one process.

What it decides
    A token is computed and kept by the rank that has its part of its page, whatever chunk it came
    in::

        page of 16 tokens over 2 ranks   0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1

    In every layer, a rank that computes tokens of a sequence gets the keys and values that others
    have of it, all of them: the cache stays spread, and one layer's copy is thrown away.

Kept true (tests/multi/serve/test_invariant_ranks.py)
    Tokens and log-probabilities have the bits of one process; bytes between ranks are those that
    ``ordered_bytes`` counts.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from equipoise.base.arrays import Ints
from equipoise.comm.mail import Parcel
from equipoise.comm.steps import pack
from equipoise.serve.engine.attend import KernelRows, TextRows
from equipoise.serve.engine.kernel import TILE
from equipoise.serve.engine.pool import KvPool
from equipoise.serve.longctx.mail import RankMail
from equipoise.serve.longctx.message import Text

IN_ORDER = "in-order"
"""Name of this way beside those of ``balance.context.variant``."""


def held_positions(text: Text, page_tokens: int, ranks: int) -> list[Ints]:
    """Positions of a text's tokens, the new ones included, that each rank keeps, ascending.

    >>> from equipoise.serve.longctx.message import Text
    >>> [each.tolist() for each in held_positions(Text(3, 4, 1, (), ()), 4, 2)]
    [[0, 1, 4, 5], [2, 3, 6]]
    """
    positions = np.arange(text.start + text.tokens)
    homes = positions % page_tokens * ranks // page_tokens
    return [np.flatnonzero(homes == rank) for rank in range(ranks)]


def rows_by_position(texts: Sequence[Text], page_tokens: int, ranks: int) -> tuple[Ints, ...]:
    """The new tokens that each rank computes: rows of all texts' new tokens, ascending."""
    rows: list[list[Ints]] = [[] for _ in range(ranks)]
    first = 0
    for text in texts:
        for mine, held in zip(rows, held_positions(text, page_tokens, ranks), strict=True):
            mine.append(first + held[held >= text.start] - text.start)
        first += text.tokens
    return tuple(np.concatenate(each) for each in rows)


def ordered_bytes(texts: Sequence[Text], page_tokens: int, ranks: int, token_bytes: int) -> Ints:
    """Bytes from each rank (row) to each rank in one layer, int64 [ranks, ranks].

    Args:
        texts: Chunks of an iteration.
        page_tokens: Tokens of a page, over all ranks.
        ranks: All of them.
        token_bytes: Of one token's keys and values in one layer.
    """
    sent = np.zeros((ranks, ranks), dtype=np.int64)
    for text in texts:
        held = held_positions(text, page_tokens, ranks)
        reads = np.array([bool((each >= text.start).any()) for each in held])
        sent += np.outer([len(each) for each in held], reads) * token_bytes
    np.fill_diagonal(sent, 0)
    return sent


class OrderedAttention:
    """The attention of one iteration on one rank, called once for each layer."""

    def __init__(self, pool: KvPool, mail: RankMail, texts: Sequence[Text]) -> None:
        self._pool, self._mail = pool, mail
        ranks, rank = mail.ranks, mail.rank
        stored = list[int]()
        self._sent: list[list[slice]] = [[] for _ in range(ranks)]
        """Rows of this rank's pool that each rank reads."""
        arriving: list[list[Ints]] = [[] for _ in range(ranks)]
        rows, first, packed = list[TextRows](), 0, 0
        for text in texts:
            held = held_positions(text, pool.page_tokens, ranks)
            own = held[rank]
            new = own[own >= text.start]
            pages = [page for run in text.runs for page in range(run.first, run.first + run.pages)]
            stored += pool.row_numbers(pages, len(own) - len(new), len(own))
            for peer, each in enumerate(held):
                if (each >= text.start).any():
                    self._sent[peer] += pool.views(text.runs, len(own))
            if not len(new):
                continue
            for peer, each in enumerate(held):
                arriving[peer].append(first * TILE + each)
            tiles = -(-(text.start + text.tokens) // TILE)
            at = np.arange(packed, packed + len(new))
            rows.append(TextRows(at, new, range(first, first + tiles)))
            first, packed = first + tiles, packed + len(new)
        self._stored_t = torch.tensor(stored, dtype=torch.int64)
        self._at = [torch.from_numpy(np.concatenate(each)) if each else None for each in arriving]
        """Where keys of each rank stand among all keys that this rank reads."""
        self._rows = KernelRows(rows, TILE) if rows else None
        shape = 2, first * TILE, *pool.keys(0).shape[1:]
        self._read = torch.empty(shape, dtype=pool.dtype)

    def attend(self, layer: int, q_tHE: Tensor, k_tGE: Tensor, v_tGE: Tensor) -> Tensor:
        """Keep the new keys and values, and attend over all ranks: outputs [t, H, E]."""
        keys, values = self._pool.keys(layer), self._pool.values(layer)
        keys[self._stored_t], values[self._stored_t] = k_tGE, v_tGE
        arriving = self._exchange(keys, values)
        if self._rows is None:
            return q_tHE
        for at, held in zip(self._at, arriving, strict=True):
            if at is not None and held is not None:
                self._read[:, at] = held
        return self._rows.attend(q_tHE, self._read[0], self._read[1])

    def _exchange(self, keys: Tensor, values: Tensor) -> list[Tensor | None]:
        """Keys and values that this rank reads, by the rank that has them."""
        mail, sends = self._mail, list[Parcel]()
        arriving: list[Tensor | None] = []
        for peer, (views, at) in enumerate(zip(self._sent, self._at, strict=True)):
            parts = [rows[view] for rows in (keys, values) for view in views]
            if peer == mail.rank:
                shape = 2, -1, *keys.shape[1:]
                arriving.append(torch.cat(parts).view(shape) if at is not None else None)
                continue
            if parts and any(map(len, parts)):
                sends.append(Parcel(peer, 0, pack(parts), 0))
            count = 0 if at is None else len(at)
            arriving.append(keys.new_empty(2, count, *keys.shape[1:]) if count else None)
        receives = [
            Parcel(peer, 0, held.view(-1).view(torch.uint8), 0)
            for peer, held in enumerate(arriving)
            if held is not None and peer != mail.rank
        ]
        mail.post(sends, receives)
        mail.wait(0)
        return arriving
