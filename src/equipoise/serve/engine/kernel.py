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

    What runs is always the code as numba's cache has it: where it has none, another process
    compiles it first. Code that was just compiled is optimised once less than what is kept of it,
    and a few sums have other bits; a server's first start would differ from its second.

Kept true (tests/unit/serve/engine/test_kernel.py)
    Equal to a softmax in float64; equal bits alone, in a batch, in a block, on other pages, with
    other numbers of threads, and in a process that compiled it as in one that did not.

Sources
    Keys in parts, merged by log-sum-exp: Flash-Decoding, https://pytorch.org/blog/flash-decoding.
    exp: Cephes' ``expf``, https://www.netlib.org/cephes.
"""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

TILE = 128
"""Keys that are scored before they are merged [tokens]."""

BLOCK_ROWS = 8
"""Most rows that share a block."""

_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_UNSEEN = np.float32(-1e30)
"""Score of a key that the row does not read: finite, so that no difference is NaN."""

_LEAST = np.float32(-87)
"""Below this exp is 0; the smallest normal float32 is exp(-87.3)."""

_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3)
_P2, _P3 = np.float32(8.3334519073e-3), np.float32(4.1665795894e-2)
_P4, _P5 = np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)

Array = np.ndarray[Any, Any]

_CORES: int = vars(numba.config)["NUMBA_NUM_THREADS"]

_FAST = {"contract", "reassoc", "nsz"}
"""NaN stays NaN; sums are vectorised, in an order that the compiled code fixes."""


def _compile(*, parallel: bool = False) -> Callable[[Any], Any]:
    def compiled(function: Any) -> Any:
        settings: Any = {"fastmath": _FAST, "error_model": "numpy", "parallel": parallel}
        try:
            return numba.njit(cache=True, **settings)(function)
        except RuntimeError:  # it can write neither beside the source nor in the user's cache
            return numba.njit(**settings)(function)

    return compiled


def _make_float(context: Any, bits: Any) -> Any:
    del context, bits

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        return builder.bitcast(given[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _make_wide(context: Any, x: Any) -> Any:
    del context

    def generate(_: Any, builder: Any, signature: Any, given: Any) -> Any:
        if signature.args[0] != types.uint16:
            return given[0]
        bits = builder.zext(given[0], ir.IntType(32))
        return builder.bitcast(builder.shl(bits, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return types.float32(x), generate


_from_bits: Any = intrinsic(_make_float)
"""The float32 with the bits of a uint32."""

_wide: Any = intrinsic(_make_wide)
"""A float32 as it is; bf16, whose bits arrive as uint16, as float32."""


@_compile()
def _exp(x: Any) -> Any:
    if x <= _LEAST:
        return _ZERO
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    p = p * r * r + r + _ONE
    return p * _from_bits(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))


@_compile()
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
    wide = np.empty((TILE, width), np.float32)
    shares = np.empty((lines, TILE), np.float32)
    for a in range(lines):
        for e in range(width):
            line[a, e] = q[first + a // group, g * group + a % group, e]
    for j in range(count):
        row = pages[sequence, (begin + j) // page_tokens] * page_tokens + (begin + j) % page_tokens
        for e in range(width):
            wide[j, e] = _wide(keys[row, g, e])
    for a in range(lines):
        seen = max(0, min(count, positions[first + a // group] + 1 - begin))
        for j in range(seen):
            score = _ZERO
            for e in range(width):
                score += line[a, e] * wide[j, e]
            shares[a, j] = score
        for j in range(seen, TILE):
            shares[a, j] = _UNSEEN
        # Over whole tiles always: the order of a sum depends on its length.
        most = _UNSEEN
        for j in range(TILE):
            most = max(most, shares[a, j])
        total = _ZERO
        for j in range(TILE):
            share = _exp(shares[a, j] - most)
            shares[a, j] = share
            total += share
        parts[first + a // group, at, g * group + a % group, width] = most
        parts[first + a // group, at, g * group + a % group, width + 1] = total
    for j in range(count):
        row = pages[sequence, (begin + j) // page_tokens] * page_tokens + (begin + j) % page_tokens
        for e in range(width):
            wide[j, e] = _wide(values[row, g, e])
    whole = (count + 3) // 4 * 4
    for j in range(count, whole):
        for e in range(width):
            wide[j, e] = _ZERO
    for a in range(lines):
        for e in range(width):
            line[a, e] = _ZERO
        for j in range(0, whole, 4):
            p0, p1, p2, p3 = shares[a, j], shares[a, j + 1], shares[a, j + 2], shares[a, j + 3]
            for e in range(width):
                line[a, e] += (
                    p0 * wide[j, e]
                    + p1 * wide[j + 1, e]
                    + p2 * wide[j + 2, e]
                    + p3 * wide[j + 3, e]
                )
        for e in range(width):
            parts[first + a // group, at, g * group + a % group, e] = line[a, e]


def _attend_rows(
    q: Any,
    keys: Any,
    values: Any,
    pages: Any,
    page_tokens: Any,
    positions: Any,
    work: Any,
    parts: Any,
    o: Any,
) -> Any:
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
            share = _exp(parts[r, at, h, width] - most)
            total += share * parts[r, at, h, width + 1]
            for e in range(width):
                o[r, h, e] += share * parts[r, at, h, e]
        for e in range(width):
            o[r, h, e] /= total


class RowsKernel:
    """Softmax attention of rows over the pages of their sequences."""

    def __init__(self) -> None:
        self._run: Any = _compile(parallel=True)(_attend_rows)
        self._ready: set[np.dtype[Any]] = set()
        """Of keys: code for them is in the cache, or cannot be kept."""

    def __call__(
        self,
        q: Array,
        keys: Array,
        values: Array,
        pages: Array,
        page_tokens: int,
        positions: Array,
        work: Array,
        parts: Array,
        o: Array,
    ) -> None:
        """Compute the outputs; all arrays are contiguous.

        Args:
            q: Scaled queries, fp32 [rows, query heads, width].
            keys: Of the pool, [pool rows, kv heads, width], fp32, or bf16 as uint16.
            values: Likewise.
            pages: Pages of each sequence, int32 [sequences, most pages].
            page_tokens: Tokens of a page.
            positions: Position of each row in its sequence, int32 [rows]; it reads keys up to
                there.
            work: Blocks and tiles, int32 [items, 4]: sequence, first row, rows, tile.
            parts: Written: sums of each tile, fp32 [rows, most tiles, query heads, width + 2].
            o: Written: outputs, fp32 [rows, query heads, width].
        """
        if keys.dtype not in self._ready:
            self.prepare(keys.dtype)
        self._run(q, keys, values, pages, page_tokens, positions, work, parts, o)

    def prepare(self, dtype: np.dtype[Any]) -> None:
        """See that code for keys of this dtype is in the cache; compiling it takes some seconds."""
        self._ready.add(dtype)
        if self._run.stats.cache_path is None:
            return
        given = _smallest(dtype)
        kinds = tuple(map(self._run.typeof_pyval, given))
        # numba has no public way to ask without compiling.
        if self._run._cache.load_overload(kinds, self._run.targetctx) is None:
            words = f"from {__name__} import compile_rows; compile_rows({dtype.name!r})"
            subprocess.run([sys.executable, "-c", words], check=False, stderr=subprocess.DEVNULL)

    def compile(self, dtype: np.dtype[Any]) -> None:
        """Compile it here, so that it is in the cache."""
        self._run(*_smallest(dtype))


def _smallest(dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Arguments for one row that reads one key."""
    q = np.zeros((1, 1, 1), np.float32)
    keys = np.zeros((1, 1, 1), dtype)
    pages, positions = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    work = np.array([[0, 0, 1, 0]], np.int32)
    return q, keys, keys, pages, 1, positions, work, np.zeros((1, 1, 1, 3), np.float32), q.copy()


def compile_rows(name: str) -> None:
    """Compile the kernel for keys of a dtype, in a process that does nothing else."""
    attend_rows.compile(np.dtype(name))


attend_rows = RowsKernel()


def use_threads(threads: int) -> None:
    """Run kernels that this thread calls on this many threads, at most one per core."""
    numba.set_num_threads(min(threads, _CORES))
