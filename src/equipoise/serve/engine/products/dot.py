"""Products of pairs of bf16, summed in fp32: the instruction that compiled code has no word for.

Why
    ``vdpbf16ps`` multiplies 32 pairs at once. A processor with it, but without matrix units, does
    three times as many products a second by it as torch's own attention.

What it decides
    Lines and lanes of one block: as many as sums fit in registers. Each sum is over the pairs in
    ascending order, whatever the block. The block that adds begins with the sums that are there, so
    that pairs may come in parts, and a sum has the same bits however they are cut.

Kept true (tests/unit/serve/engine/test_chunks.py, test_products.py)
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
"""Rows and columns of the block that stores its sums: 24 of 32 registers."""

ADDED_LINES, ADDED_LANES = 8, 48
"""Those of the block that adds, likewise; measured, with weights it is a tenth faster."""

WIDTH = 16
"""Numbers of fp32 in a register."""

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
_FLOATS, _INTS = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(_INT, WIDTH)
BFLOAT = _BFloat()
_PAIRS = ir.VectorType(BFLOAT, 2 * WIDTH)


def _block(lines: int, lanes: int, *, adds: bool) -> Any:
    """An intrinsic that computes one block."""

    def make(
        context: Any,
        a: Any,
        first: Any,
        step: Any,
        b: Any,
        begin: Any,
        stride: Any,
        pairs: Any,
        c: Any,
    ) -> Any:
        del context, first, step, begin, stride, pairs

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            arrays = (context.make_array(signature.args[at]) for at in (0, 3, 7))
            a, b, c = (
                make(context, builder, given[at]).data
                for make, at in zip(arrays, (0, 3, 7), strict=True)
            )
            a = builder.bitcast(a, _INT.as_pointer())
            block = _Block(builder, c, lines, lanes // WIDTH)
            sums = block.loaded() if adds else block.zeros()
            left, right = (a, given[1], given[2]), (b, given[4], given[5])
            block.store(block.summed(left, right, given[6], sums))
            return context.get_dummy_value()

        return types.void(a, *[types.intp] * 2, b, *[types.intp] * 3, c), generate

    return intrinsic(make)


class _Block:
    """Sums of products on their way through registers."""

    def __init__(self, builder: Any, c: Any, lines: int, vectors: int) -> None:
        self._builder, self._c = builder, c
        self._lines, self._vectors = range(lines), range(vectors)

    def zeros(self) -> list[list[Any]]:
        nothing = ir.Constant(_FLOATS, [0.0] * WIDTH)
        return [[nothing for _ in self._vectors] for _ in self._lines]

    def loaded(self) -> list[list[Any]]:
        return [[self._load(self._place(*at)) for at in row] for row in self._places()]

    def store(self, sums: list[list[Any]]) -> None:
        for row, totals in zip(self._places(), sums, strict=True):
            for at, total in zip(row, totals, strict=True):
                self._builder.store(total, self._place(*at)).align = 4

    def summed(self, left: Any, right: Any, pairs: Any, begun: list[list[Any]]) -> list[list[Any]]:
        """A loop over pairs whose sums stay in registers."""
        builder, (a, first, step), (b, begin, stride) = self._builder, left, right
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])
        multiply = builder.module.declare_intrinsic(_INSTRUCTION, (), kind)
        nothing = ir.Constant(_INTS, ir.Undefined)
        before = builder.block
        loop, done = builder.append_basic_block("pairs"), builder.append_basic_block("stored")
        builder.branch(loop)
        builder.position_at_end(loop)
        at = builder.phi(_LONG)
        at.add_incoming(_LONG(0), before)
        sums = [[builder.phi(_FLOATS) for _ in self._vectors] for _ in self._lines]
        row = builder.add(begin, builder.mul(at, stride))
        held = []
        for vector in self._vectors:
            place = builder.gep(b, [builder.add(row, _LONG(WIDTH * vector))])
            loaded = builder.load(builder.bitcast(place, _INTS.as_pointer()))
            loaded.align = 4
            held.append(builder.bitcast(loaded, _PAIRS))
        after = builder.add(at, _LONG(1))
        for line in self._lines:
            place = builder.add(builder.add(first, builder.mul(step, _LONG(line))), at)
            pair = builder.insert_element(nothing, builder.load(builder.gep(a, [place])), _INT(0))
            spread = builder.shuffle_vector(pair, nothing, ir.Constant(_INTS, [0] * WIDTH))
            both = builder.bitcast(spread, _PAIRS)
            for vector in self._vectors:
                total = sums[line][vector]
                total.add_incoming(begun[line][vector], before)
                sums[line][vector] = builder.call(multiply, [total, both, held[vector]])
                total.add_incoming(sums[line][vector], loop)
        at.add_incoming(after, loop)
        builder.cbranch(builder.icmp_signed("<", after, pairs), loop, done)
        builder.position_at_end(done)
        return sums

    def _places(self) -> list[list[tuple[int, int]]]:
        return [[(line, vector) for vector in self._vectors] for line in self._lines]

    def _place(self, line: int, vector: int) -> Any:
        at = self._builder.gep(self._c, [_LONG(WIDTH * (len(self._vectors) * line + vector))])
        return self._builder.bitcast(at, _FLOATS.as_pointer())

    def _load(self, place: Any) -> Any:
        loaded = self._builder.load(place)
        loaded.align = 4
        return loaded


dot_pairs: Any = _block(LINES, LANES, adds=False)
"""``LINES`` x ``LANES`` sums of products, stored in ``c``; all arrays are contiguous.

``a`` is read as pairs of bf16 from pair ``first`` on, and its lines are ``step`` pairs apart. ``b``
(uint32, each two bf16) is read from ``begin`` on; its pairs are ``stride`` apart, and its lanes are
neighbours. ``pairs`` is at least 1.
"""

add_pairs: Any = _block(ADDED_LINES, ADDED_LANES, adds=True)
"""``ADDED_LINES`` x ``ADDED_LANES`` sums of products, added to those in ``c``; else the same."""

grow_pairs: Any = _block(LINES, LANES, adds=True)
"""``LINES`` x ``LANES`` sums of products, likewise."""
