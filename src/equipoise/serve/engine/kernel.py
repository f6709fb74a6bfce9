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

_HALF = TILE // 2

_SOME = 16
"""Keys or values of all heads that are in fp32 at the same time: memory is read as it lies."""

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
    work: Any,
    parts: Any,
    line: Any,
    held: Any,
    shares: Any,
    lanes: Any,
) -> None:
    """Scores, shares and sums of one block of rows over one tile of keys."""
    sequence, first, rows, at = work[0], work[1], work[2], work[3]
    heads, width, kv_heads = q.shape[1], q.shape[2], keys.shape[1]
    lines, begin, group = rows * heads, at * TILE, heads // kv_heads
    count = min(TILE, positions[first + rows - 1] + 1 - begin)
    page, left = begin // page_tokens, page_tokens - begin % page_tokens
    row = pages[sequence, page] * page_tokens + begin % page_tokens
    for some in range(0, count, _SOME):
        here = min(_SOME, count - some)
        for j in range(here):
            if not left:
                page, left = page + 1, page_tokens
                row = pages[sequence, page] * page_tokens
            for g in range(kv_heads):
                for e in range(width):
                    held[j, g, e] = wide(keys[row, g, e])
            row, left = row + 1, left - 1
        for a in range(lines):
            r, h = first + a // heads, a % heads
            seen, g = min(here, positions[r] + 1 - begin - some), h // group
            for j in range(seen):
                score = _ZERO
                for e in range(width):
                    score += q[r, h, e] * held[j, g, e]
                shares[a, some + j] = score
    for a in range(lines):
        r, h = first + a // heads, a % heads
        for j in range(max(0, min(count, positions[r] + 1 - begin)), TILE):
            shares[a, j] = _UNSEEN
        # By halves, for a chain of comparisons does not vectorise.
        for j in range(_HALF):
            one, other = shares[a, j], shares[a, _HALF + j]
            lanes[j] = one if one > other else other
        reach = _HALF
        while reach > 1:
            reach //= 2
            for j in range(reach):
                one, other = lanes[j], lanes[j + reach]
                lanes[j] = one if one > other else other
        most = lanes[0]
        # Over whole tiles always: the order of a sum depends on its length.
        total = _ZERO
        for j in range(TILE):
            share = exp(shares[a, j] - most)
            shares[a, j] = share
            total += share
        parts[r, at, h, width] = most
        parts[r, at, h, width + 1] = total
        for e in range(width):
            line[a, e] = _ZERO
    page, left = begin // page_tokens, page_tokens - begin % page_tokens
    row = pages[sequence, page] * page_tokens + begin % page_tokens
    for some in range(0, count, _SOME):
        here = min(_SOME, count - some)
        for j in range(here):
            if not left:
                page, left = page + 1, page_tokens
                row = pages[sequence, page] * page_tokens
            for g in range(kv_heads):
                for e in range(width):
                    held[j, g, e] = wide(values[row, g, e])
            row, left = row + 1, left - 1
        whole = (here + 3) // 4 * 4
        for j in range(here, whole):
            for g in range(kv_heads):
                for e in range(width):
                    held[j, g, e] = _ZERO
        for a in range(lines):
            g = a % heads // group
            for j in range(0, whole, 4):
                p0, p1 = shares[a, some + j], shares[a, some + j + 1]
                p2, p3 = shares[a, some + j + 2], shares[a, some + j + 3]
                for e in range(width):
                    line[a, e] += (
                        p0 * held[j, g, e]
                        + p1 * held[j + 1, g, e]
                        + p2 * held[j + 2, g, e]
                        + p3 * held[j + 3, g, e]
                    )
    for a in range(lines):
        for e in range(width):
            parts[first + a // heads, at, a % heads, e] = line[a, e]


@compile_rows(parallel=True)
def attend_rows(
    q: Any,
    keys: Any,
    values: Any,
    pages: Any,
    page_tokens: Any,
    positions: Any,
    work: Any,
    threads: Any,
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
        threads: Threads that it runs on.
        parts: Written: sums of each tile, fp32 [rows, most tiles, query heads, width + 2].
        o: Written: outputs, fp32 [rows, query heads, width].
        lse: Written: log-sum-exp of the scores, fp32 [rows, query heads].
    """
    heads, kv_heads, width = q.shape[1], keys.shape[1], q.shape[2]
    for thread in numba.prange(threads):
        line = np.empty((BLOCK_ROWS * heads, width), np.float32)
        held = np.empty((_SOME, kv_heads, width), np.float32)
        shares = np.empty((BLOCK_ROWS * heads, TILE), np.float32)
        lanes = np.empty(_HALF, np.float32)
        for i in range(thread, len(work), threads):
            _attend_tile(
                q,
                keys,
                values,
                pages,
                page_tokens,
                positions,
                work[i],
                parts,
                line,
                held,
                shares,
                lanes,
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
