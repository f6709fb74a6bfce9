"""What each instruction of a pipeline takes, and what it leaves in memory.

What it decides
    A price for each stage and each micro-batch, in whole nanoseconds, so that every rank that
    holds the same prices writes the same schedule. Stages may differ (embedding, head, dense
    and expert layers), and so may micro-batches (documents of any lengths).

    An *activation* is what a forward leaves behind for its backward, in any unit: bytes, or 1.
    It counts from the start of its forward to the end of its weight gradient: the whole of it
    is kept until then, although the weight gradient alone needs less.

Kept true (tests/unit/schedule/pipeline/test_replay.py)
    Prices of the wrong shape or below 0 are refused.

Sources
    The W stash counted whole: Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError


@dataclass(frozen=True, slots=True, eq=False)
class PipelinePrices:
    """Prices of one step; tables are int64 [stages, micro-batches]."""

    forward_ns: Ints
    input_ns: Ints
    """Gradient of the input [ns]."""
    weight_ns: Ints
    """Gradient of the weights [ns]."""
    hop_ns: Ints
    """One message between two ranks, from its end of computing to its arrival, of each
    micro-batch, int64 [micro-batches] [ns]."""
    activation: Ints
    """What a forward leaves until its weight gradient is through."""

    @property
    def stages(self) -> int:
        """How many stages are priced."""
        return len(self.forward_ns)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches are priced."""
        return int(self.forward_ns.shape[1])

    def of_ops(self) -> Ints:
        """Time of every operation, int64 [4, stages, micro-batches], by ``Op`` [ns]."""
        both = self.input_ns + self.weight_ns
        return np.stack((self.forward_ns, both, self.input_ns, self.weight_ns))


def make_prices(
    forward_ns: npt.ArrayLike,
    input_ns: npt.ArrayLike,
    weight_ns: npt.ArrayLike,
    *,
    hop_ns: npt.ArrayLike = 0,
    activation: npt.ArrayLike = 1,
    stages: int | None = None,
    micro_batches: int | None = None,
) -> PipelinePrices:
    """Prices from tables, columns or numbers, as NumPy broadcasts them.

    Args:
        forward_ns: Of [stages, micro-batches], of [stages, 1], of [micro-batches], or one
            number; rounded to whole nanoseconds.
        input_ns: Gradient of the input, likewise.
        weight_ns: Gradient of the weights, likewise.
        hop_ns: One message between ranks, of each micro-batch or one number.
        activation: What a forward leaves behind, in any unit, likewise.
        stages: How many, where no table says so.
        micro_batches: How many, where no table says so.

    Raises:
        LayoutError: the shapes do not go together, or a price is below 0 or no number.

    >>> make_prices(1, 1, 1, stages=4, micro_batches=8).forward_ns.shape
    (4, 8)
    """
    given = [np.asarray(each, dtype=np.float64) for each in (forward_ns, input_ns, weight_ns)]
    given.append(np.asarray(activation, dtype=np.float64))
    hop = np.asarray(hop_ns, dtype=np.float64)
    try:
        shape = np.broadcast_shapes(
            *(each.shape for each in given), hop.shape, (stages or 1, micro_batches or 1)
        )
    except ValueError:
        shapes = ", ".join(str(each.shape) for each in (*given, hop))
        raise LayoutError(
            f"Prices of shapes {shapes} and {stages or 1} stages of {micro_batches or 1} "
            f"micro-batches do not go together. Give tables of [stages, micro-batches]."
        ) from None
    if len(shape) != 2 or hop.ndim > 1:
        raise LayoutError(
            f"Prices have the shape {shape}, hops {hop.shape}. Give tables of [stages, "
            f"micro-batches] and hops of [micro-batches]."
        )
    for name, table in zip(
        ("forward", "input", "weight", "activation", "hop"), (*given, hop), strict=True
    ):
        wrong = table[~((table >= 0) & (table < 2**62))]
        if wrong.size:
            raise LayoutError(
                f"A {name} price is {wrong[0]:g} ns. Prices are 0 or more, and less than 2**62 ns, "
                f"which are 146 years."
            )
    tables = [
        np.ascontiguousarray(np.broadcast_to(np.rint(each), shape)).astype(np.int64)
        for each in given
    ]
    hops = np.ascontiguousarray(np.broadcast_to(np.rint(hop), shape[1:])).astype(np.int64)
    return PipelinePrices(tables[0], tables[1], tables[2], hops, tables[3])
