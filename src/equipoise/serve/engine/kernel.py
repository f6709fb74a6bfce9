"""Attention of query rows over a paged cache, for all sequences of an iteration at once, on CPU.

Why
    A generated token is one query. Calling an operator for each sequence costs more than its
    attention; this kernel runs all rows of an iteration over the pages where their keys are.

What it decides
    A row's keys are cut into tiles at multiples of ``TILE`` tokens of its own sequence. Within a
    tile everything is summed in one order, tiles are merged in ascending order. So a row's output
    depends on its own query, keys and values alone: not on the other rows, not on where its pages
    are, not on the thread that computes it.

    Rows of one sequence that follow each other may share a *block*: their keys are read once, and
    each row's arithmetic is the same as by itself.

Kept true (tests/unit/serve/engine/test_kernel.py)
    Equal to a softmax in float64; equal bits alone, in a batch, in a block, on other pages, with
    other numbers of threads, and in a process that compiled it as in one that did not.

Sources
    Keys in parts, merged by log-sum-exp: Flash-Decoding, https://pytorch.org/blog/flash-decoding.
"""

import math
from typing import Any

import numba
import numpy as np

from equipoise.serve.engine.jit import compile_rows, exp, wide

TILE = 128
"""Keys that are scored before they are merged [tokens]."""

BLOCK_ROWS = 8
"""Most rows that share a block."""

_ZERO = np.float32(0)
_UNSEEN = np.float32(-1e30)
"""Score of a key that the row does not read: finite, so that no difference is NaN."""


@compile_rows()
def _attend_tile(
    q: Any,
    keys: Any,
    values: Any,
    pages: Any,
    page_tokens: Any,
    positions: Any,
    sequence: Any,
    first: Any,
    rows: Any,
    at: Any,
    g: Any,
    parts: Any,
) -> Any:
    """Scores, shares and sums of one block of rows over one tile of keys, in one group of heads."""
    width, group = q.shape[2], q.shape[1] // keys.shape[1]
    lines, begin = rows * group, at * TILE
    count = min(TILE, positions[first + rows - 1] + 1 - begin)
    line = np.empty((lines, width), np.float32)
    held = np.empty((TILE, width), np.float32)
    shares = np.empty((lines, TILE), np.float32)
    for a in range(lines):
        for e in range(width):
            line[a, e] = q[first + a // group, g * group + a % group, e]
    for j in range(count):
        row = pages[sequence, (begin + j) // page_tokens] * page_tokens + (begin + j) % page_tokens
        for e in range(width):
            held[j, e] = wide(keys[row, g, e])
    for a in range(lines):
        seen = max(0, min(count, positions[first + a // group] + 1 - begin))
        for j in range(seen):
            score = _ZERO
            for e in range(width):
                score += line[a, e] * held[j, e]
            shares[a, j] = score
        for j in range(seen, TILE):
            shares[a, j] = _UNSEEN
        # Over whole tiles always: the order of a sum depends on its length.
        most = _UNSEEN
        for j in range(TILE):
            most = max(most, shares[a, j])
        total = _ZERO
        for j in range(TILE):
            share = exp(shares[a, j] - most)
            shares[a, j] = share
            total += share
        parts[first + a // group, at, g * group + a % group, width] = most
        parts[first + a // group, at, g * group + a % group, width + 1] = total
    for j in range(count):
        row = pages[sequence, (begin + j) // page_tokens] * page_tokens + (begin + j) % page_tokens
        for e in range(width):
            held[j, e] = wide(values[row, g, e])
    whole = (count + 3) // 4 * 4
    for j in range(count, whole):
        for e in range(width):
            held[j, e] = _ZERO
    for a in range(lines):
        for e in range(width):
            line[a, e] = _ZERO
        for j in range(0, whole, 4):
            p0, p1, p2, p3 = shares[a, j], shares[a, j + 1], shares[a, j + 2], shares[a, j + 3]
            for e in range(width):
                line[a, e] += (
                    p0 * held[j, e]
                    + p1 * held[j + 1, e]
                    + p2 * held[j + 2, e]
                    + p3 * held[j + 3, e]
                )
        for e in range(width):
            parts[first + a // group, at, g * group + a % group, e] = line[a, e]


@compile_rows(parallel=True)
def attend_rows(
    q: Any,
    keys: Any,
    values: Any,
    pages: Any,
    page_tokens: Any,
    positions: Any,
    work: Any,
    parts: Any,
    o: Any,
    lse: Any,
) -> Any:
    """Softmax attention of rows over the pages of their sequences; all arrays are contiguous.

    Args:
        q: Scaled queries, fp32 [rows, query heads, width].
        keys: Of the pool, [pool rows, kv heads, width], fp32, or bf16 as uint16.
        values: Likewise.
        pages: Pages of each sequence, int32 [sequences, most pages].
        page_tokens: Tokens of a page.
        positions: Position of each row in its sequence, int32 [rows]; it reads keys up to there.
        work: Blocks and tiles, int32 [items, 4]: sequence, first row, rows, tile.
        parts: Written: sums of each tile, fp32 [rows, most tiles, query heads, width + 2].
        o: Written: outputs, fp32 [rows, query heads, width].
        lse: Written: log-sum-exp of the scores, fp32 [rows, query heads].
    """
    heads, kv_heads, width = q.shape[1], keys.shape[1], q.shape[2]
    for item in numba.prange(len(work) * kv_heads):
        i = item // kv_heads
        _attend_tile(
            q,
            keys,
            values,
            pages,
            page_tokens,
            positions,
            work[i, 0],
            work[i, 1],
            work[i, 2],
            work[i, 3],
            item % kv_heads,
            parts,
        )
    for item in numba.prange(len(q) * heads):
        r, h = item // heads, item % heads
        tiles = positions[r] // TILE + 1
        most = _UNSEEN
        for at in range(tiles):
            most = max(most, parts[r, at, h, width])
        for e in range(width):
            o[r, h, e] = _ZERO
        total = _ZERO
        for at in range(tiles):
            share = exp(parts[r, at, h, width] - most)
            total += share * parts[r, at, h, width + 1]
            for e in range(width):
                o[r, h, e] += share * parts[r, at, h, e]
        for e in range(width):
            o[r, h, e] /= total
        lse[r, h] = most + math.log(total)
