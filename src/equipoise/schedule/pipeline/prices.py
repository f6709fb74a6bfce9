"""The time of each pipeline instruction, and what it leaves in memory.

What it decides
    A price for each stage and micro-batch in whole nanoseconds, so that ranks with the same
    prices write the same schedule. Stages may differ (embedding, head, dense and expert layers),
    and so may micro-batches (documents of any lengths).

    An *activation* is what a forward leaves for its backward, in any unit: bytes, or 1. It is
    held whole from the start of the forward to the end of the weight gradient, although the
    weight gradient alone needs less.

Kept true (tests/unit/schedule/pipeline/test_replay.py)
    Prices of the wrong shape, or negative, are refused.

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
    """Time of the input gradient [ns]."""
    weight_ns: Ints
    """Time of the weight gradient [ns]."""
    hop_ns: Ints
    """Time of one message between ranks, from the end of its computation to its arrival, int64
    [micro-batches] [ns]."""
    activation: Ints
    """What a forward holds until its weight gradient ends."""

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
    """Prices from tables, columns or numbers, broadcast by NumPy.

    Args:
        forward_ns: Forward times: [stages, micro-batches], [stages, 1], [micro-batches] or one
            number; rounded to whole nanoseconds.
        input_ns: Times of input gradients, likewise.
        weight_ns: Times of weight gradients, likewise.
        hop_ns: Time of one message between ranks, per micro-batch or one number.
        activation: What a forward leaves behind, in any unit, likewise.
        stages: Number of stages, if no table says so.
        micro_batches: Number of micro-batches, if no table says so.

    Raises:
        LayoutError: the shapes do not match, or a price is negative or not a number.

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
            f"Prices of shapes {shapes} do not match {stages or 1} stages and "
            f"{micro_batches or 1} micro-batches. Give tables of [stages, micro-batches]."
        ) from None
    if len(shape) != 2 or hop.ndim > 1:
        raise LayoutError(
            f"Prices have shape {shape} and hops {hop.shape}. Give tables of [stages, "
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
