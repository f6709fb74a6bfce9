"""What stands between the matrix products of a layer, row by row, compiled for CPU.

Why
    A norm is eight operators, a rotation four, a gate two. A row of a generated token is so short
    that calling them takes longer than the products; here each is one call.

What it decides
    Everything is computed in fp32 and rounded once, when it is stored.

Kept true (tests/unit/serve/engine/test_fused.py)
    Equal to the layers' own modules up to rounding; equal bits whatever rows stand beside a row.
"""

from typing import Any

import numba
import numpy as np

from equipoise.serve.engine.jit import compile_rows, exp, narrow, wide

_ZERO, _ONE = np.float32(0), np.float32(1)
_MOST = np.float32(88)


@compile_rows(parallel=True)
def norm_rows(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """Root-mean-square norm of each row.

    Args:
        x: Rows [rows, width], fp32, or bf16 as uint16.
        weight: Scales, fp32 [width].
        eps: Added to the mean square.
        out: Written, like ``x``.
    """
    width = x.shape[1]
    for r in numba.prange(len(x)):
        total = _ZERO
        for d in range(width):
            total += wide(x[r, d]) * wide(x[r, d])
        scale = _ONE / np.sqrt(total / np.float32(width) + eps)
        for d in range(width):
            out[r, d] = narrow(wide(x[r, d]) * scale * weight[d], out[r, d])


@compile_rows()
def _turn(x: Any, scale: Any, weight: Any, cos: Any, sin: Any, out: Any) -> Any:
    """One head of one row, scaled and rotated by its position's angles."""
    half = len(cos)
    for e in range(half):
        a = wide(x[e]) * scale * weight[e]
        b = wide(x[half + e]) * scale * weight[half + e]
        out[e] = narrow(a * cos[e] - b * sin[e], out[e])
        out[half + e] = narrow(b * cos[e] + a * sin[e], out[half + e])


@compile_rows()
def _scale(x: Any, eps: Any) -> Any:
    total = _ZERO
    for e in range(len(x)):
        total += wide(x[e]) * wide(x[e])
    return _ONE / np.sqrt(total / np.float32(len(x)) + eps)


@compile_rows(parallel=True)
def head_rows(
    x: Any, table: Any, has_norm: Any, norms: Any, eps: Any, q: Any, k: Any, v: Any
) -> None:
    """Queries, keys and values of each row out of their joint product, rotated.

    Args:
        x: Products [rows, (query heads + 2 kv heads) * width], fp32, or bf16 as uint16.
        table: Cosines and sines [2, rows, 1, width / 2], in the same dtype.
        has_norm: Whether each head of queries and keys is normed first.
        norms: Scales of these norms, fp32 [2, width]; ones without.
        eps: Added to their mean squares.
        q: Written [rows, query heads, width], in the same dtype.
        k: Written [rows, kv heads, width].
        v: Likewise.
    """
    heads, kv_heads, width = q.shape[1], k.shape[1], q.shape[2]
    half = width // 2
    for r in numba.prange(len(x)):
        cos, sin = np.empty(half, np.float32), np.empty(half, np.float32)
        for e in range(half):
            cos[e], sin[e] = wide(table[0, r, 0, e]), wide(table[1, r, 0, e])
        for h in range(heads + kv_heads):
            head = x[r, h * width : (h + 1) * width]
            scale = _scale(head, eps) if has_norm else _ONE
            if h < heads:
                _turn(head, scale, norms[0], cos, sin, q[r, h])
            else:
                _turn(head, scale, norms[1], cos, sin, k[r, h - heads])
        first = (heads + kv_heads) * width
        for h in range(kv_heads):
            for e in range(width):
                v[r, h, e] = x[r, first + h * width + e]


@compile_rows(parallel=True)
def gate_rows(x: Any, out: Any) -> None:
    """``silu(gate) * up`` of each row.

    Args:
        x: Gates and ups [rows, 2 * hidden], fp32, or bf16 as uint16.
        out: Written [rows, hidden], in the same dtype.
    """
    hidden = out.shape[1]
    for r in numba.prange(len(x)):
        for f in range(hidden):
            gate = wide(x[r, f])
            share = gate / (_ONE + exp(min(-gate, _MOST)))
            out[r, f] = narrow(share * wide(x[r, hidden + f]), out[r, f])
