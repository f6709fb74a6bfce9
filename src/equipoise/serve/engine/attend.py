"""Attention of one iteration: prompts and generated tokens of many sequences, over the pool.

What it decides
    Which code computes which rows. A chunk of a prompt attends by the flash operator that trains
    (``nn.tile``): to the rows before it, run by run, and causally to itself; parts are merged by
    their log-sum-exp. All short chunks, which are mostly one generated token each, go through one
    call of ``kernel`` on CPU; elsewhere each is a tile of its own.

    ::

                    rows before, in runs of pages     the chunk itself
        chunk of t  [ full tile ][ full tile ]        [ causal tile ]

    In the invariant mode every row goes through the kernel, whose results depend on the row alone.

Kept true (tests/unit/serve/engine/test_forward.py, by Hypothesis)
    However sequences are cut into chunks and spread over pages, the outputs are those of the
    whole sequences; no row reads another sequence.

Shapes: t packed new tokens, H query heads, G key/value heads, E head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.nn.tile import attend_tile, merge_tile_, sum_dtype
from equipoise.schedule.batching.iteration import ServeChunk
from equipoise.serve.engine.jit import bits_of, use_threads
from equipoise.serve.engine.kernel import BLOCK_ROWS, TILE, attend_rows
from equipoise.serve.engine.pool import KvPool

_SHORT_TOKENS = 8
"""Chunks up to this length go through the kernel."""


@dataclass(frozen=True, slots=True)
class _Tiles:
    """A chunk that attends by tiles."""

    span: slice
    """Its packed rows."""
    before: tuple[slice, ...]
    """Rows of the pool that hold the tokens before it."""


class _Rows:
    """Packed rows that go through the kernel."""

    def __init__(self, chunks: Sequence[tuple[slice, ServeChunk]], *, pages: int) -> None:
        """Cut them into blocks and tiles.

        Args:
            chunks: Packed rows of each chunk.
            pages: Most pages of a chunk that are read.
        """
        self.at = torch.tensor([row for span, _ in chunks for row in range(span.start, span.stop)])
        self.positions = np.array(
            [at for _, each in chunks for at in range(each.start, each.start + each.tokens)],
            dtype=np.int32,
        )
        self.pages = np.zeros((len(chunks), pages), dtype=np.int32)
        work, first = list[tuple[int, int, int, int]](), 0
        for sequence, (_, chunk) in enumerate(chunks):
            held = chunk.pages[:pages]
            self.pages[sequence, : len(held)] = held
            for begin in range(0, chunk.tokens, BLOCK_ROWS):
                rows = min(BLOCK_ROWS, chunk.tokens - begin)
                last = chunk.start + begin + rows - 1
                work += [(sequence, first + begin, rows, tile) for tile in range(last // TILE + 1)]
            first += chunk.tokens
        self.work = np.array(work, dtype=np.int32)
        self.tiles = int(self.positions.max()) // TILE + 1


class IterationAttention:
    """The attention of one iteration, called once for each layer."""

    def __init__(
        self,
        pool: KvPool,
        chunks: Sequence[ServeChunk],
        *,
        is_invariant: bool,
        short_tokens: int = _SHORT_TOKENS,
    ) -> None:
        """Find each token's row in the pool.

        Args:
            pool: Keys and values; those of tokens before each chunk are there.
            chunks: In the order in which their tokens are packed.
            is_invariant: Whether rows may depend on nothing but themselves.
            short_tokens: Most tokens of a chunk that goes through the kernel.
        """
        self._pool = pool
        stored, self._tiles, short = list[int](), list[_Tiles](), list[tuple[slice, ServeChunk]]()
        begin = 0
        for chunk in chunks:
            span = slice(begin, begin + chunk.tokens)
            begin = span.stop
            stored += pool.row_numbers(chunk.pages, chunk.start, chunk.start + chunk.tokens)
            if is_invariant or (chunk.tokens <= short_tokens and pool.device.type == "cpu"):
                short.append((span, chunk))
            else:
                self._tiles.append(_Tiles(span, tuple(pool.views(chunk.runs, chunk.start))))
        self._stored_t = torch.tensor(stored, device=pool.device)
        most = max((each.start + each.tokens for _, each in short), default=0)
        self._rows = _Rows(short, pages=-(-most // pool.page_tokens)) if short else None
        self._are_all_short = not self._tiles

    def attend(self, layer: int, q_tHE: Tensor, k_tGE: Tensor, v_tGE: Tensor) -> Tensor:
        """Keep the new keys and values, and attend: outputs [t, H, E]."""
        keys, values = self._pool.keys(layer), self._pool.values(layer)
        keys[self._stored_t], values[self._stored_t] = k_tGE, v_tGE
        if self._rows is not None and self._are_all_short:
            return self._by_rows(self._rows, q_tHE, keys, values)
        o_tHE = torch.empty_like(q_tHE)
        for tiles in self._tiles:
            span = tiles.span
            o_tHE[span] = _by_tiles(
                q_tHE[span], k_tGE[span], v_tGE[span], [(keys[x], values[x]) for x in tiles.before]
            )
        if self._rows is not None:
            at = self._rows.at
            o_tHE[at] = self._by_rows(self._rows, q_tHE[at], keys, values)
        return o_tHE

    def _by_rows(self, rows: _Rows, q_rHE: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        count, heads, width = q_rHE.shape
        q = (q_rHE.float() * width**-0.5).contiguous().numpy()
        parts = np.empty((count, rows.tiles, heads, width + 2), np.float32)
        o = np.empty(q.shape, np.float32)
        use_threads(torch.get_num_threads())
        attend_rows(
            q,
            bits_of(keys),
            bits_of(values),
            rows.pages,
            self._pool.page_tokens,
            rows.positions,
            rows.work,
            parts,
            o,
        )
        return torch.from_numpy(o).to(q_rHE.dtype)


def _by_tiles(
    q_tHE: Tensor, k_tGE: Tensor, v_tGE: Tensor, before: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """A chunk's attention to the rows before it, and causally to itself."""
    o_tHE, lse_tH = attend_tile(q_tHE, k_tGE, v_tGE, "causal")
    if not before:
        return o_tHE
    o_tHE, lse_tH = o_tHE.to(sum_dtype(q_tHE.dtype)), lse_tH.clone()
    for keys, values in before:
        merge_tile_(o_tHE, lse_tH, *attend_tile(q_tHE, keys, values, "full"))
    return o_tHE.to(q_tHE.dtype)
