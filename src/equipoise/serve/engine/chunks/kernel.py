"""Attention of a run of queries to a run of keys, in bf16, by products of pairs.

Why
    A prompt of thousands of tokens spends most of its time in attention, and torch's operator
    computes bf16 no faster than fp32 where there are no matrix units.

What it decides
    Keys and values are laid out in pairs once for all rows. Then blocks of rows, one group of heads
    each, pass over tiles of keys in ascending order; all heads of a group share what is loaded.
    Scores and sums are in fp32; a tile's shares are rounded to bf16 before they multiply values, as
    in torch's operator. The log-sum-exp is that of the shares before they are rounded.

    ::

        keys   of a tile  [pairs of E][TILE]      scores [LINES, TILE]  = q . keys
        values of a tile  [pairs of TILE][E]      output [LINES, E]    += shares . values

Kept true (tests/unit/serve/engine/test_chunks.py)
    No further from a softmax in float64 than torch's operator in bf16; a row reads nothing behind
    its position; equal bits wherever its pages are. Parts merged by their log-sum-exp are the
    whole.

Sources
    Softmax over tiles: FlashAttention-2, arXiv:2307.08691, algorithm 1.
"""

import math
from typing import Any

import numba
import numpy as np

from equipoise.serve.engine.chunks.shares import TILE, UNSEEN, share_line, share_seen
from equipoise.serve.engine.jit import compile_rows, exp
from equipoise.serve.engine.products.dot import LANES, LINES, dot_pairs, grow_pairs

BLOCK_ROWS = 32
"""Rows of a block."""

_HALVES = TILE // LANES
_ONE = np.float32(1)
_LOW, _BITS = np.uint32(0xFFFF), np.uint32(16)
_LN2, _LOG2_E = np.float32(math.log(2)), np.float32(1 / math.log(2))


@compile_rows(parallel=True)
def pack_keys(keys: Any, values: Any, pages: Any, page_tokens: Any, count: Any, packed: Any) -> Any:
    """Lay a text's keys and values out in pairs; all arrays are contiguous.

    Args:
        keys: Of the pool, as pairs, uint32 [pool rows, kv heads, width / 2].
        values: Likewise.
        pages: Pages of the text, int32.
        page_tokens: Tokens of a page.
        count: Tokens of the text.
        packed: Written, uint32 [2, kv heads, tiles, TILE * width / 2]: keys, then values; zeros
            behind the last token.
    """
    half, heads = keys.shape[2], keys.shape[1]
    for item in numba.prange(packed.shape[2] * heads):
        tile, g = item // heads, item % heads
        first = tile * TILE
        held = min(TILE, count - first)
        k, v = packed[0, g, tile], packed[1, g, tile]
        if held < TILE:
            k[:] = v[:] = np.uint32(0)
        rows = np.empty(TILE, np.int64)
        for j in range(held):
            rows[j] = pages[(first + j) // page_tokens] * page_tokens + (first + j) % page_tokens
        for j in range(held):
            key = keys[rows[j], g]
            for e in range(half):
                k[e * TILE + j] = key[e]
        for j in range(0, held - 1, 2):
            even, odd = values[rows[j], g], values[rows[j + 1], g]
            for e in range(half):
                at = j * half + 2 * e
                v[at] = (even[e] & _LOW) | (odd[e] << _BITS)
                v[at + 1] = (even[e] >> _BITS) | (odd[e] & ~_LOW)
        if held % 2:
            last = values[rows[held - 1], g]
            for e in range(half):
                at = (held - 1) * half + 2 * e
                v[at], v[at + 1] = last[e] & _LOW, last[e] >> _BITS


@compile_rows(parallel=True)
def attend_chunk(
    q: Any,
    packed: Any,
    seen: Any,
    more: Any,
    group: Any,
    scale: Any,
    threads: Any,
    o: Any,
    lse: Any,
) -> None:
    """Softmax attention of rows to the keys that each sees; all arrays are contiguous.

    Args:
        q: Queries as pairs, uint32 [rows, query heads, width / 2].
        packed: Of ``pack_keys``.
        seen: Keys that the first row sees, at least one.
        more: Keys that each row sees more than the one before it: 1 in a text, 0 if all rows see
            the same.
        group: Query heads of each head of keys.
        scale: Scores are multiplied by it.
        threads: Threads that it runs on.
        o: Written: outputs, fp32 [rows, query heads, width].
        lse: Written: log-sum-exp of the scores, fp32 [rows, query heads].
    """
    rows, half, kv_heads = len(q), q.shape[2], packed.shape[1]
    width = 2 * half
    items = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS * kv_heads
    each, times = (items + threads - 1) // threads, scale * _LOG2_E
    for turn in numba.prange(threads * each):
        # Later blocks read more keys: they are dealt, for each thread has a run of turns.
        item = turn % each * threads + turn // each
        if item >= items:
            continue
        first, g = item // kv_heads * BLOCK_ROWS, item % kv_heads
        count = min(BLOCK_ROWS, rows - first)
        lines = (count * group + LINES - 1) // LINES * LINES
        line = np.zeros((lines, half), np.uint32)
        sums = np.zeros((width // LANES, lines, LANES), np.float32)
        most = np.full(lines, UNSEEN, np.float32)
        total = np.zeros(lines, np.float32)
        scores = np.empty((_HALVES, LINES, LANES), np.float32)
        shares = np.empty((LINES, TILE), np.uint16)
        for a in range(count * group):
            for e in range(half):
                line[a, e] = q[first + a // group, g * group + a % group, e]
        for tile in range((seen + more * (first + count - 1) - 1) // TILE + 1):
            keys, values = packed[0, g, tile], packed[1, g, tile]
            for top in range(0, lines, LINES):
                for at in range(_HALVES):
                    dot_pairs(line, top * half, half, keys, at * LANES, TILE, half, scores[at])
                for a in range(LINES):
                    here = seen + more * (first + (top + a) // group) - tile * TILE
                    before, at = most[top + a], top + a
                    if here >= TILE:
                        most[at], added = share_line(scores, a, times, here, before, shares)
                    else:
                        most[at], added = share_seen(scores, a, times, here, before, shares)
                    if most[at] != before:
                        kept = exp((before - most[at]) * _LN2)
                        total[at] *= kept
                        for block in range(len(sums)):
                            for e in range(LANES):
                                sums[block, at, e] *= kept
                    total[at] += added
                for block in range(len(sums)):
                    into = sums[block, top : top + LINES]
                    grow_pairs(shares, 0, TILE // 2, values, block * LANES, width, TILE // 2, into)
        for a in range(count * group):
            row, h, share = first + a // group, g * group + a % group, _ONE / total[a]
            lse[row, h] = most[a] * _LN2 + math.log(total[a])
            for block in range(len(sums)):
                for e in range(LANES):
                    o[row, h, block * LANES + e] = sums[block, a, e] * share
