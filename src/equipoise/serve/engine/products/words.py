"""Products of few rows with bf16 weights, on processors that have no instruction for bf16.

Why
    Such a product reads its weights once and does little with them. Libraries widen bf16 on the
    way through buffers, which takes several times as long as the reading; in fp32 weights are twice
    the bytes. Here they are widened in registers.

What it decides
    Weights are laid out once in panels of ``LANES`` outputs, two inputs to a word, so that a shift
    and a mask make both of them fp32. Each output is summed in fp32 over the inputs in ascending
    order, whatever the other rows and the number of threads, and rounded once. ::

        panel of 64 outputs   word [pair of inputs][output]   sums of LINES rows in registers

Kept true (tests/unit/serve/engine/test_products.py)
    Equal to products in float64 up to the rounding of bf16; a row has the same bits whatever rows
    stand beside it.
"""

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from torch import Tensor

from equipoise.nn.device.halves import widens
from equipoise.serve.engine.bits import bits_of
from equipoise.serve.engine.jit import compile_rows, narrow, use_threads, wide
from equipoise.serve.engine.products.panels import added_rows, panels_of

LINES, LANES = 4, 64
"""Rows and outputs of a block: 16 of 32 registers are sums, 8 are weights."""

_WIDTH = 16
_INT, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_INT, _WIDTH), ir.VectorType(_FLOAT, _WIDTH)


def multiplies_words(weight: Tensor) -> bool:
    """Whether products of few rows with this weight [outputs, inputs] are computed here."""
    is_bf16 = weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
    has_vectors = "+avx512f" in str(cpu_target.target_context.codegen()._tm_features)
    return is_bf16 and has_vectors and widens(weight)


def _make_block(context: Any, a: Any, first: Any, b: Any, begin: Any, pairs: Any, c: Any) -> Any:
    del context, first, begin, pairs

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        rows, words, sums = (
            context.make_array(signature.args[at])(context, builder, given[at]).data
            for at in (0, 2, 5)
        )
        _write_block(builder, (rows, given[1]), (words, given[3]), given[4], sums)
        return context.get_dummy_value()

    return types.void(a, types.intp, b, *[types.intp] * 2, c), generate


def _write_block(builder: Any, left: Any, right: Any, pairs: Any, c: Any) -> None:
    """A loop over pairs of inputs whose sums stay in registers, and the sums stored."""
    (a, first), (b, begin) = left, right
    vectors = LANES // _WIDTH
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    fused = builder.module.declare_intrinsic("llvm.fma.v16f32", (), kind)
    nothing = ir.Constant(_FLOATS, ir.Undefined)
    spread = ir.Constant(_INTS, [0] * _WIDTH)
    before = builder.block
    loop, done = builder.append_basic_block("pairs"), builder.append_basic_block("stored")
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(_LONG)
    at.add_incoming(_LONG(0), before)
    sums = [[builder.phi(_FLOATS) for _ in range(vectors)] for _ in range(LINES)]
    weights = []
    for vector in range(vectors):
        place = builder.add(begin, builder.add(builder.mul(at, _LONG(LANES)), _LONG(16 * vector)))
        words = builder.load(builder.bitcast(builder.gep(b, [place]), _INTS.as_pointer()))
        words.align = 4
        low = builder.shl(words, ir.Constant(_INTS, [16] * _WIDTH))
        high = builder.and_(words, ir.Constant(_INTS, [0xFFFF0000] * _WIDTH))
        weights.append([builder.bitcast(part, _FLOATS) for part in (low, high)])
    after = builder.add(at, _LONG(1))
    for line in range(LINES):
        row = builder.mul(builder.add(first, _LONG(line)), builder.mul(pairs, _LONG(2)))
        totals = list(sums[line])
        for odd in range(2):
            place = builder.add(row, builder.add(builder.mul(at, _LONG(2)), _LONG(odd)))
            one = builder.insert_element(nothing, builder.load(builder.gep(a, [place])), _INT(0))
            all_ = builder.shuffle_vector(one, nothing, spread)
            for vector in range(vectors):
                given = [all_, weights[vector][odd], totals[vector]]
                totals[vector] = builder.call(fused, given)
        for vector, total in enumerate(totals):
            sums[line][vector].add_incoming(ir.Constant(_FLOATS, [0.0] * _WIDTH), before)
            sums[line][vector].add_incoming(total, loop)
        sums[line] = totals
    at.add_incoming(after, loop)
    builder.cbranch(builder.icmp_signed("<", after, pairs), loop, done)
    builder.position_at_end(done)
    for line in range(LINES):
        for vector in range(vectors):
            place = builder.gep(c, [_LONG(LANES * line + _WIDTH * vector)])
            stored = builder.store(sums[line][vector], builder.bitcast(place, _FLOATS.as_pointer()))
            stored.align = 4


_multiply_block: Any = intrinsic(_make_block)
"""``LINES`` x ``LANES`` sums of products, stored in ``c``: of rows of ``a`` (fp32) from ``first``
on with words of ``b`` (uint32) from ``begin`` on. All arrays are contiguous; ``pairs`` is at least
1."""


@compile_rows(parallel=True)
def multiply_words(x: Any, words: Any, added: Any, step: Any, out: Any) -> Any:
    """Products of rows, plus what is added; all arrays are contiguous.

    Args:
        x: Rows in fp32 [rows rounded up to LINES, inputs].
        words: Weights, uint32 [panels, inputs / 2, LANES].
        added: bf16 as uint16 [rows or 1, outputs].
        step: Rows of ``added`` from one row to the next: 1, or 0 if it has one for all.
        out: Written, bf16 as uint16 [rows, outputs].
    """
    pairs, rows, outputs = words.shape[1], out.shape[0], out.shape[1]
    for panel in numba.prange(len(words)):
        sums = np.empty((LINES, LANES), np.float32)
        lanes = min(LANES, outputs - panel * LANES)
        for first in range(0, rows, LINES):
            _multiply_block(x, first, words, panel * pairs * LANES, pairs, sums)
            for line in range(min(LINES, rows - first)):
                r = first + line
                for lane in range(lanes):
                    at = panel * LANES + lane
                    out[r, at] = narrow(sums[line, lane] + wide(added[r * step, at]), out[r, at])


class WordWeight:
    """A weight whose halves of words are widened in registers."""

    def __init__(self, weight: Tensor) -> None:
        """Lay out a bf16 weight [outputs, inputs]; inputs are even."""
        self.outputs = len(weight)
        """Its outputs."""
        self._words = panels_of(weight, LANES)

    def multiply(self, x: Tensor, added: Tensor | None) -> Tensor:
        """As ``PairWeight.multiply``."""
        rows = x.new_zeros(-(-len(x) // LINES) * LINES, x.shape[1], dtype=torch.float32)
        rows[: len(x)] = x
        more, step = added_rows(x, added, self.outputs)
        out = x.new_empty(len(x), self.outputs)
        use_threads(torch.get_num_threads())
        multiply_words(rows.numpy(), self._words.numpy(), bits_of(more), step, bits_of(out))
        return out
