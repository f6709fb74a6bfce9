"""Products of pairs of bf16, summed in fp32: the instruction that compiled code has no word for.

Why
    ``vdpbf16ps`` multiplies 32 pairs at once. A processor with it, but without matrix units, does
    three times as many products a second by it as torch's own attention.

What it decides
    Lines and lanes of one block: as many as sums fit in registers. Each sum is over the pairs in
    ascending order, whatever the block.

Kept true (tests/unit/serve/engine/test_chunks.py)
    Equal to products in float64, up to the rounding of fp32.

Sources
    Intel 64 and IA-32 Architectures Software Developer's Manual, ``VDPBF16PS``: the products and
    sums of a pair round to nearest even, and denormals are zero.
"""

from typing import Any

import torch
from llvmlite import ir
from numba.core import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

LINES, LANES = 6, 64
"""Rows and columns of a block: 24 of 32 registers are sums."""

_WIDTH = 16
_INSTRUCTION = "llvm.x86.avx512bf16.dpbf16ps.512"


def multiplies_pairs() -> bool:
    """Whether this processor has the instruction, and no matrix units, which are faster."""
    has = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    return has and "+avx512bf16" in str(cpu_target.target_context.codegen()._tm_features)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_LONG, _INT, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_FLOAT, _WIDTH), ir.VectorType(_INT, _WIDTH)
_PAIRS = ir.VectorType(_BFloat(), 2 * _WIDTH)


def _make_dot(
    context: Any, a: Any, first: Any, step: Any, b: Any, begin: Any, stride: Any, pairs: Any, c: Any
) -> Any:
    del context, first, step, begin, stride, pairs

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        arrays = (context.make_array(signature.args[at]) for at in (0, 3, 7))
        a, b, c = (
            make(context, builder, given[at]).data
            for make, at in zip(arrays, (0, 3, 7), strict=True)
        )
        a = builder.bitcast(a, _INT.as_pointer())
        _write_block(builder, (a, given[1], given[2]), (b, given[4], given[5]), given[6], c)
        return context.get_dummy_value()

    return types.void(a, *[types.intp] * 2, b, *[types.intp] * 3, c), generate


def _write_block(builder: Any, left: Any, right: Any, pairs: Any, c: Any) -> None:
    """A loop over pairs whose sums stay in registers, and the sums stored."""
    (a, first, step), (b, begin, stride) = left, right
    vectors = LANES // _WIDTH
    multiply = builder.module.declare_intrinsic(
        _INSTRUCTION, (), ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])
    )
    nothing = ir.Constant(_INTS, ir.Undefined)
    before = builder.block
    loop, done = builder.append_basic_block("pairs"), builder.append_basic_block("stored")
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(_LONG)
    at.add_incoming(_LONG(0), before)
    sums = [[builder.phi(_FLOATS) for _ in range(vectors)] for _ in range(LINES)]
    row = builder.add(begin, builder.mul(at, stride))
    held = []
    for vector in range(vectors):
        place = builder.gep(b, [builder.add(row, _LONG(_WIDTH * vector))])
        loaded = builder.load(builder.bitcast(place, _INTS.as_pointer()))
        loaded.align = 4
        held.append(builder.bitcast(loaded, _PAIRS))
    after = builder.add(at, _LONG(1))
    for line in range(LINES):
        place = builder.add(builder.add(first, builder.mul(step, _LONG(line))), at)
        pair = builder.insert_element(nothing, builder.load(builder.gep(a, [place])), _INT(0))
        spread = builder.shuffle_vector(pair, nothing, ir.Constant(_INTS, [0] * _WIDTH))
        both = builder.bitcast(spread, _PAIRS)
        for vector in range(vectors):
            total = sums[line][vector]
            total.add_incoming(ir.Constant(_FLOATS, [0.0] * _WIDTH), before)
            sums[line][vector] = builder.call(multiply, [total, both, held[vector]])
            total.add_incoming(sums[line][vector], loop)
    at.add_incoming(after, loop)
    builder.cbranch(builder.icmp_signed("<", after, pairs), loop, done)
    builder.position_at_end(done)
    for line in range(LINES):
        for vector in range(vectors):
            place = builder.gep(c, [_LONG(LANES * line + _WIDTH * vector)])
            stored = builder.store(sums[line][vector], builder.bitcast(place, _FLOATS.as_pointer()))
            stored.align = 4


dot_pairs: Any = intrinsic(_make_dot)
"""``LINES`` x ``LANES`` sums of products, stored in ``c``; all arrays are contiguous.

``a`` is read as pairs of bf16 from pair ``first`` on, and its lines are ``step`` pairs apart. ``b``
(uint32, each two bf16) is read from ``begin`` on; its pairs are ``stride`` apart, and its lanes are
neighbours. ``pairs`` is at least 1.
"""
