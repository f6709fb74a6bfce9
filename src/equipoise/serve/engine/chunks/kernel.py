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

from equipoise.serve.engine.jit import compile_rows, exp, narrow
from equipoise.serve.engine.products.dot import LANES, LINES, dot_pairs

TILE = 128
"""Keys of a tile."""

BLOCK_ROWS = 32
"""Rows of a block."""

_HALVES = TILE // LANES
_ZERO, _ONE = np.float32(0), np.float32(1)
_UNSEEN = np.float32(-1e30)


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
        for j in range(TILE):
            if first + j < count:
                row = pages[(first + j) // page_tokens] * page_tokens + (first + j) % page_tokens
                for e in range(half):
                    packed[0, g, tile, e * TILE + j] = keys[row, g, e]
            else:
                for e in range(half):
                    packed[0, g, tile, e * TILE + j] = np.uint32(0)
        for j in range(0, TILE, 2):
            at = j * half
            for e in range(2 * half):
                packed[1, g, tile, at + e] = np.uint32(0)
            for odd in range(min(2, count - first - j)):
                token = first + j + odd
                row = pages[token // page_tokens] * page_tokens + token % page_tokens
                for e in range(half):
                    pair = values[row, g, e]
                    low, high = pair & np.uint32(0xFFFF), pair >> np.uint32(16)
                    packed[1, g, tile, at + 2 * e] |= low << np.uint32(16 * odd)
                    packed[1, g, tile, at + 2 * e + 1] |= high << np.uint32(16 * odd)


@compile_rows()
def _share_tile(
    scores: Any, scale: Any, seen: Any, line: Any, most: Any, lanes: Any, shares: Any
) -> Any:
    """Shares of one line in a tile, in bf16: its largest score so far, and the shares' sum."""
    for half in range(_HALVES):
        left = seen - half * LANES
        for j in range(LANES):
            score = scores[half, line, j] * scale
            scores[half, line, j] = score if j < left else _UNSEEN
    # By halves, for a chain of comparisons does not vectorise.
    for j in range(LANES):
        a, b = scores[0, line, j], scores[1, line, j]
        lanes[j] = a if a > b else b
    for reach in (32, 16, 8, 4, 2, 1):
        for j in range(reach):
            a, b = lanes[j], lanes[j + reach]
            lanes[j] = a if a > b else b
    largest = max(most, lanes[0])
    total = _ZERO
    for half in range(_HALVES):
        for j in range(LANES):
            share = exp(scores[half, line, j] - largest)
            total += share
            shares[line, half * LANES + j] = narrow(share, np.uint16(0))
    return largest, total


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
    each = (items + threads - 1) // threads
    for turn in numba.prange(threads * each):
        # Later blocks read more keys: they are dealt, for each thread has a run of turns.
        item = turn % each * threads + turn // each
        if item >= items:
            continue
        first, g = item // kv_heads * BLOCK_ROWS, item % kv_heads
        count = min(BLOCK_ROWS, rows - first)
        lines = (count * group + LINES - 1) // LINES * LINES
        line = np.zeros((lines, half), np.uint32)
        sums = np.zeros((lines, width), np.float32)
        most = np.full(lines, _UNSEEN, np.float32)
        total = np.zeros(lines, np.float32)
        scores = np.empty((_HALVES, LINES, LANES), np.float32)
        shares = np.empty((LINES, TILE), np.uint16)
        lanes = np.empty(LANES, np.float32)
        part = np.empty((LINES, LANES), np.float32)
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
                    before = most[top + a]
                    most[top + a], added = _share_tile(
                        scores, scale, here, a, before, lanes, shares
                    )
                    kept = exp(before - most[top + a])
                    total[top + a] = total[top + a] * kept + added
                    for e in range(width):
                        sums[top + a, e] *= kept
                for lane in range(0, width, LANES):
                    dot_pairs(shares, 0, TILE // 2, values, lane, width, TILE // 2, part)
                    for a in range(LINES):
                        for e in range(LANES):
                            sums[top + a, lane + e] += part[a, e]
        for a in range(count * group):
            row, h, share = first + a // group, g * group + a % group, _ONE / total[a]
            lse[row, h] = most[a] + math.log(total[a])
            for e in range(width):
                o[row, h, e] = sums[a, e] * share
