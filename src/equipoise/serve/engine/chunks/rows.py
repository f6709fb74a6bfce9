"""Attention by products of pairs: of a chunk over the pages of its text, and of any other tile.

What it decides
    Where that is done: in bf16 on CPUs that have the instruction, with heads of whole blocks. A
    tile of few queries goes through ``nn.tile``: laying its keys out would cost more than it saves.

Kept true (tests/unit/serve/engine/test_chunks.py)
    Outputs are those of the whole text, however it was cut into chunks or tiles.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.nn.tile import AttendTile, attend_tile
from equipoise.schedule.attention.schedule import TileKind
from equipoise.schedule.batching.iteration import ServeChunk
from equipoise.serve.engine.bits import bits_of
from equipoise.serve.engine.chunks.kernel import attend_chunk, pack_keys
from equipoise.serve.engine.chunks.shares import TILE
from equipoise.serve.engine.jit import use_threads
from equipoise.serve.engine.pool import KvPool
from equipoise.serve.engine.products.dot import LANES, multiplies_pairs

_multiplies_pairs = cache(multiplies_pairs)

_LEAST_QUERIES = 9
"""Queries of a tile from which pairs gain. Measured, one core of Zen 4: 9 queries over 37 keys take
1.15 times as long as by torch's operator, over 2,048 keys 0.79; 2,048 over 2,048 take 0.50."""


def attends_by_pairs(pool: KvPool) -> bool:
    """Whether chunks over this pool can attend so."""
    is_bf16 = pool.device.type == "cpu" and pool.dtype == torch.bfloat16
    return is_bf16 and pool.keys(0).shape[2] % LANES == 0 and _multiplies_pairs()


def tile_attention(pool: KvPool) -> AttendTile:
    """What computes tiles over this pool fastest."""
    return attend_pairs if attends_by_pairs(pool) else attend_tile


class PairedChunk:
    """The attention of one chunk, called once for each layer."""

    def __init__(self, span: slice, chunk: ServeChunk, pool: KvPool) -> None:
        """Lay out a chunk.

        Args:
            span: Its packed rows.
            chunk: Keys and values of its own tokens are in the pool when it attends.
            pool: One of which ``attends_by_pairs`` is true.
        """
        self.span = span
        """Its packed rows."""
        self._start = chunk.start
        pages = np.array(chunk.pages, dtype=np.int32)
        heads, width = pool.keys(0).shape[1:]
        self._keys = _PairedKeys(pages, pool.page_tokens, chunk.start + chunk.tokens, heads, width)

    def attend(self, q_tHE: Tensor, keys: Tensor, values: Tensor, o_tHE: Tensor) -> None:
        """Write the chunk's outputs.

        Args:
            q_tHE: Queries of all packed rows, contiguous.
            keys: Of one layer of the pool.
            values: Likewise.
            o_tHE: Outputs of all packed rows.
        """
        self._keys.pack(keys, values)
        o_tHE[self.span] = self._keys.attend(q_tHE[self.span], seen=self._start + 1, more=1)[0]


def attend_pairs(
    q_tHE: Tensor, k_sGE: Tensor, v_sGE: Tensor, kind: TileKind, *, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``nn.tile.attend_tile`` where ``attends_by_pairs``; outputs and log-sum-exp are in fp32."""
    if len(q_tHE) < _LEAST_QUERIES or softcap:
        return attend_tile(q_tHE, k_sGE, v_sGE, kind, softcap=softcap)
    is_backward = kind == "anticausal"
    q, k, v = (x.flip(0) if is_backward else x.contiguous() for x in (q_tHE, k_sGE, v_sGE))
    count, heads, width = k.shape
    keys = _PairedKeys(np.zeros(1, dtype=np.int32), count, count, heads, width)
    keys.pack(k, v)
    o_tHE, lse_tH = keys.attend(q, *((count, 0) if kind == "full" else (1, 1)))
    return (o_tHE.flip(0), lse_tH.flip(0)) if is_backward else (o_tHE, lse_tH)


class _PairedKeys:
    """Keys and values of one text, in pairs."""

    def __init__(
        self, pages: NDArray[np.int32], page_tokens: int, count: int, heads: int, width: int
    ) -> None:
        self._where: Any = pages, page_tokens, count
        self._packed = np.empty((2, heads, -(-count // TILE), TILE * width // 2), dtype=np.uint32)

    def pack(self, keys: Tensor, values: Tensor) -> None:
        """Take the keys and values of one layer."""
        use_threads(torch.get_num_threads())
        k, v = (bits_of(x).view(np.uint32) for x in (keys, values))
        pack_keys(k, v, *self._where, self._packed)

    def attend(self, q_tHE: Tensor, seen: int, more: int) -> tuple[Tensor, Tensor]:
        """Outputs and their log-sum-exp, in fp32; the numbers as for ``attend_chunk``."""
        threads, width = torch.get_num_threads(), q_tHE.shape[2]
        use_threads(threads)
        group, scale = q_tHE.shape[1] // self._packed.shape[1], np.float32(width**-0.5)
        o, lse = np.empty(q_tHE.shape, np.float32), np.empty(q_tHE.shape[:2], np.float32)
        q = bits_of(q_tHE).view(np.uint32)
        attend_chunk(q, self._packed, seen, more, group, scale, threads, o, lse)
        return torch.from_numpy(o), torch.from_numpy(lse)
