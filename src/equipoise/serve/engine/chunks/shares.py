"""Shares of a line of scores in a softmax, sixteen at a time: what compiled loops do not reach.

Why
    Beside products at the processor's peak, compiled loops spent a third of attention on shares:
    they rounded, scaled and narrowed by half a dozen instructions each what the processor does by
    one. Measured, a tile's line 92 and 31 ns; 512 rows over 4,096 keys on two cores of Zen 4
    250 and 354 gigaflops a second.

What it decides
    Powers of two, for rounding to a whole exponent is one instruction: scores are multiplied by
    log2(e) beside their scale. Sums are over the lanes in an order that the code fixes.

Kept true (tests/unit/serve/engine/test_chunks.py)
    Powers of float64, rounded to bf16, and 0 below the smallest normal number; their sum to 4e-7.
    What is not a number stays so.

Sources
    exp2: Cephes' ``exp2f``, https://www.netlib.org/cephes. Instructions: Intel 64 and IA-32
    Architectures Software Developer's Manual, ``VSCALEFPS``, ``VCVTNEPS2BF16``.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from equipoise.serve.engine.products.dot import BFLOAT, LANES, LINES, WIDTH

TILE = 2 * LANES
"""Scores of a line: those of a tile of keys."""

UNSEEN = np.float32(-1e30)
"""A score in place of one that a row does not see."""

_POWERS = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
_SHORT, _INT, _LONG, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(_INT, WIDTH)
_HALVES = ir.VectorType(BFLOAT, WIDTH)
_NEAREST = _INT(4)
"""The rounding that the processor is set to."""


def _all(number: float) -> ir.Constant:
    return ir.Constant(_FLOATS, [float(np.float32(number))] * WIDTH)


class _ScoreLine:
    """One line on its way through registers."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def spread(self, number: Any) -> Any:
        nothing = ir.Constant(ir.VectorType(number.type, WIDTH), ir.Undefined)
        one = self._builder.insert_element(nothing, number, _INT(0))
        return self._builder.shuffle_vector(one, nothing, ir.Constant(_INTS, [0] * WIDTH))

    def first(self, vector: Any) -> Any:
        return self._builder.extract_element(vector, _INT(0))

    def loaded(self, scores: Any, line: Any) -> list[Any]:
        builder, vectors = self._builder, []
        for at in range(0, TILE, WIDTH):
            half, lane = divmod(at, LANES)
            row = builder.add(line, _LONG(half * LINES))
            place = builder.add(builder.mul(row, _LONG(LANES)), _LONG(lane))
            vector = builder.bitcast(builder.gep(scores, [place]), _FLOATS.as_pointer())
            vectors.append(builder.load(vector))
            vectors[-1].align = 4
        return vectors

    def seen(self, vectors: list[Any], count: Any) -> list[Any]:
        """``UNSEEN`` from a place on."""
        limit, shown = self.spread(self._builder.trunc(count, _INT)), []
        for at, vector in enumerate(vectors):
            lanes = ir.Constant(_INTS, [at * WIDTH + lane for lane in range(WIDTH)])
            is_seen = self._builder.icmp_signed("<", lanes, limit)
            shown.append(self._builder.select(is_seen, vector, _all(float(UNSEEN))))
        return shown

    def larger(self, a: Any, b: Any) -> Any:
        return self._builder.select(self._builder.fcmp_ordered(">", a, b), a, b)

    def folded(self, vectors: list[Any], join: Any) -> Any:
        """All lanes of all vectors joined, in every lane."""
        while len(vectors) > 1:
            vectors = [join(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        (vector,) = vectors
        for reach in (8, 4, 2, 1):
            order = ir.Constant(_INTS, [lane ^ reach for lane in range(WIDTH)])
            vector = join(vector, self._builder.shuffle_vector(vector, vector, order))
        return vector

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        rounded = self._builder.module.declare_intrinsic("llvm.fma.v16f32", (), kind)
        return self._builder.call(rounded, [a, b, c])

    def power(self, x: Any) -> Any:
        """Two to the power of each lane."""
        builder = self._builder
        kind = ir.FunctionType(_FLOATS, [_FLOATS])
        nearest = builder.module.declare_intrinsic("llvm.nearbyint.v16f32", (), kind)
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _FLOATS, _FLOATS, _SHORT, _INT])
        scaled = builder.module.declare_intrinsic("llvm.x86.avx512.mask.scalef.ps.512", (), kind)
        whole = builder.call(nearest, [x])
        rest = builder.fsub(x, whole)
        result = _all(_POWERS[0])
        for factor in _POWERS[1:]:
            result = self.multiply_add(result, rest, _all(factor))
        return builder.call(scaled, [result, whole, _all(0), _SHORT(0xFFFF), _NEAREST])

    def store(self, vectors: list[Any], shares: Any, line: Any) -> None:
        """Rounded to bf16."""
        builder = self._builder
        kind = ir.FunctionType(_HALVES, [_FLOATS])
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        narrow = builder.module.declare_intrinsic(name, (), kind)
        for at, vector in enumerate(vectors):
            place = builder.add(builder.mul(line, _LONG(TILE)), _LONG(at * WIDTH))
            place = builder.bitcast(builder.gep(shares, [place]), _HALVES.as_pointer())
            builder.store(builder.call(narrow, [vector]), place).align = 2


def _shares(*, masks: bool) -> Any:
    """An intrinsic for one line."""

    def make(
        context: Any, scores: Any, line: Any, scale: Any, seen: Any, most: Any, shares: Any
    ) -> Any:
        del context, line, scale, seen, most

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            scores, shares = (
                context.make_array(signature.args[at])(context, builder, given[at]).data
                for at in (0, 5)
            )
            _, at, scale, seen, most, _ = given
            line, times = _ScoreLine(builder), _ScoreLine(builder).spread(scale)
            vectors = line.loaded(scores, at)
            if masks:
                vectors = line.seen(vectors, seen)
            largest = builder.fmul(line.folded(vectors, line.larger), times)
            largest = line.larger(line.spread(most), largest)
            below = builder.fneg(largest)
            powers = [line.power(line.multiply_add(each, times, below)) for each in vectors]
            line.store(powers, shares, at)
            total = line.folded(powers, builder.fadd)
            parts = line.first(largest), line.first(total)
            return context.make_tuple(builder, signature.return_type, parts)

        kinds = scores, types.intp, types.float32, types.intp, types.float32, shares
        both = types.UniTuple(types.float32, 2)  # type: ignore[no-untyped-call]
        return both(*kinds), generate

    return intrinsic(make)


share_line: Any = _shares(masks=False)
"""Powers of two of a line's scores below the largest one, or below ``most``.

Args: ``scores``, fp32 [2, LINES, LANES]; the line; what scores are multiplied by; those that are
seen; the largest scaled score so far; ``shares``, written, bf16 as uint16 [LINES, TILE]. Gives the
largest scaled score, and the sum of the shares before they were rounded.
"""

share_seen: Any = _shares(masks=True)
"""The same, where only the first scores are seen; the shares of others are 0."""
