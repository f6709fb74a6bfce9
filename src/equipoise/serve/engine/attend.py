"""Attention of one iteration: prompts and generated tokens of many sequences, over the pool.

What it decides
    Which code computes which rows. A chunk of a prompt attends by the flash operator that trains
    (``nn.tile``): to the rows before it, run by run, and causally to itself; parts are merged by
    their log-sum-exp. Where the processor multiplies pairs of bf16, ``chunks`` is faster. All short
    chunks, which are mostly one generated token each, go through one call of ``kernel`` on CPU;
    elsewhere each is a tile of its own.

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

from equipoise.base.arrays import Ints
from equipoise.nn.tile import attend_tile, merge_tile_, sum_dtype
from equipoise.schedule.batching.iteration import ServeChunk
from equipoise.serve.engine.bits import bits_of
from equipoise.serve.engine.chunks.rows import PairedChunk, attends_by_pairs
from equipoise.serve.engine.jit import use_threads
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


@dataclass(frozen=True, slots=True, eq=False)
class TextRows:
    """Packed rows of one sequence that go through the kernel."""

    at: Ints
    """The packed rows."""
    positions: Ints
    """Their positions in the sequence, ascending."""
    pages: Sequence[int]
    """Pages of the sequence, in order."""


class KernelRows:
    """Packed rows of several sequences that go through the kernel."""

    def __init__(self, texts: Sequence[TextRows], page_tokens: int) -> None:
        """Cut them into blocks and tiles.

        Args:
            texts: At least one, each with at least one row.
            page_tokens: Rows of a page of keys.
        """
        self._page_tokens = page_tokens
        self.at = torch.from_numpy(np.concatenate([each.at for each in texts]))
        self._positions = np.concatenate([each.positions for each in texts]).astype(np.int32)
        most = int(self._positions.max())
        self._tiles = most // TILE + 1
        self._pages = np.zeros((len(texts), most // page_tokens + 1), dtype=np.int32)
        work, first = list[tuple[int, int, int, int]](), 0
        for number, text in enumerate(texts):
            held = text.pages[: self._pages.shape[1]]
            self._pages[number, : len(held)] = held
            for begin in range(0, len(text.at), BLOCK_ROWS):
                rows = min(BLOCK_ROWS, len(text.at) - begin)
                last = int(text.positions[begin + rows - 1])
                work += [(number, first + begin, rows, tile) for tile in range(last // TILE + 1)]
            first += len(text.at)
        self._work = np.array(work, dtype=np.int32)

    def attend(self, q_rHE: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Outputs [r, H, E] in the queries' dtype; arguments as for ``sums``."""
        return self.sums(q_rHE, keys, values)[0].to(q_rHE.dtype)

    def sums(self, q_rHE: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [r, H, E] and their log-sum-exp [r, H] in fp32, in the order of ``at``.

        Args:
            q_rHE: Queries of these rows.
            keys: Rows of pages [rows, G, E]; those of all positions up to the rows' are there.
            values: Likewise.
        """
        count, heads, width = q_rHE.shape
        q = (q_rHE.float() * width**-0.5).contiguous().numpy()
        parts = np.empty((count, self._tiles, heads, width + 2), np.float32)
        o, lse = np.empty(q.shape, np.float32), np.empty((count, heads), np.float32)
        threads = torch.get_num_threads()
        use_threads(threads)
        attend_rows(
            q,
            bits_of(keys),
            bits_of(values),
            self._pages,
            self._page_tokens,
            self._positions,
            self._work,
            threads,
            parts,
            o,
            lse,
        )
        return torch.from_numpy(o), torch.from_numpy(lse)


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
        stored, self._tiles, short = list[int](), list[_Tiles](), list[TextRows]()
        self._paired, by_pairs = list[PairedChunk](), attends_by_pairs(pool)
        begin = 0
        for chunk in chunks:
            span = slice(begin, begin + chunk.tokens)
            begin = span.stop
            stored += pool.row_numbers(chunk.pages, chunk.start, chunk.start + chunk.tokens)
            if is_invariant or (chunk.tokens <= short_tokens and pool.device.type == "cpu"):
                positions = np.arange(chunk.start, chunk.start + chunk.tokens)
                short.append(TextRows(np.arange(span.start, span.stop), positions, chunk.pages))
            elif by_pairs:
                self._paired.append(PairedChunk(span, chunk, pool))
            else:
                self._tiles.append(_Tiles(span, tuple(pool.views(chunk.runs, chunk.start))))
        self._stored_t = torch.tensor(stored, device=pool.device)
        self._rows = KernelRows(short, pool.page_tokens) if short else None
        self._are_all_short = not (self._tiles or self._paired)

    def attend(self, layer: int, q_tHE: Tensor, k_tGE: Tensor, v_tGE: Tensor) -> Tensor:
        """Keep the new keys and values, and attend: outputs [t, H, E]."""
        keys, values = self._pool.keys(layer), self._pool.values(layer)
        keys[self._stored_t], values[self._stored_t] = k_tGE, v_tGE
        if self._rows is not None and self._are_all_short:
            return self._rows.attend(q_tHE, keys, values)
        o_tHE = torch.empty_like(q_tHE)
        for paired in self._paired:
            paired.attend(q_tHE, keys, values, o_tHE)
        for tiles in self._tiles:
            span = tiles.span
            o_tHE[span] = _by_tiles(
                q_tHE[span], k_tGE[span], v_tGE[span], [(keys[x], values[x]) for x in tiles.before]
            )
        if self._rows is not None:
            at = self._rows.at
            o_tHE[at] = self._rows.attend(q_tHE[at], keys, values)
        return o_tHE


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
