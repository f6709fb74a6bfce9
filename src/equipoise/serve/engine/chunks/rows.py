"""A chunk of a prompt that attends by products of pairs, over the pages of its text.

What it decides
    Where that is done: in bf16 on CPUs that have the instruction, with heads of whole blocks.

Kept true (tests/unit/serve/engine/test_chunks.py)
    Outputs are those of the whole text, however it was cut into chunks.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from equipoise.schedule.batching.iteration import ServeChunk
from equipoise.serve.engine.bits import bits_of
from equipoise.serve.engine.chunks.dot import LANES, multiplies_pairs
from equipoise.serve.engine.chunks.kernel import TILE, attend_chunk, pack_keys
from equipoise.serve.engine.jit import use_threads
from equipoise.serve.engine.pool import KvPool

_multiplies_pairs = cache(multiplies_pairs)


def attends_by_pairs(pool: KvPool) -> bool:
    """Whether chunks over this pool can attend so."""
    is_bf16 = pool.device.type == "cpu" and pool.dtype == torch.bfloat16
    return is_bf16 and pool.keys(0).shape[2] % LANES == 0 and _multiplies_pairs()


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
        self._start, self._count = chunk.start, chunk.start + chunk.tokens
        self._page_tokens = pool.page_tokens
        self._pages = np.array(chunk.pages, dtype=np.int32)
        heads, width = pool.keys(0).shape[1:]
        tiles = -(-self._count // TILE)
        self._packed = np.empty((2, heads, tiles, TILE * width // 2), dtype=np.uint32)

    def attend(self, q_tHE: Tensor, keys: Tensor, values: Tensor, o_tHE: Tensor) -> None:
        """Write the chunk's outputs.

        Args:
            q_tHE: Queries of all packed rows, contiguous.
            keys: Of one layer of the pool.
            values: Likewise.
            o_tHE: Outputs of all packed rows, contiguous.
        """
        threads, width = torch.get_num_threads(), q_tHE.shape[2]
        use_threads(threads)
        k, v, q = (bits_of(x).view(np.uint32) for x in (keys, values, q_tHE[self.span]))
        pack_keys(k, v, self._pages, self._page_tokens, self._count, self._packed)
        group, scale = q_tHE.shape[1] // keys.shape[1], np.float32(width**-0.5)
        o = bits_of(o_tHE[self.span])
        attend_chunk(q, self._packed, self._start, group, scale, threads, o)
