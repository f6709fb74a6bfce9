"""Measured collectives inside one node, by the curve name of a link."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.cost.curves.grid import LogGrid, Timing, build_grid, read_table

_STANDS_FOR = {"broadcast": "all_gather", "send": "all_gather"}
"""Stand-ins for unmeasured ops: a ring passes on equally many bytes."""


@dataclass(frozen=True, slots=True)
class CollectiveCurve:
    """Seconds by op, ranks and bytes of the whole tensor."""

    grids: dict[str, LogGrid]
    """Axes: ranks, bytes."""
    bytes_per_s: float
    """Peak of the measured link [bytes/s]."""

    def at(self, op: str, size_bytes: npt.ArrayLike, ranks: npt.ArrayLike) -> Timing:
        """Seconds, interpolated in log-log over ranks and bytes; beyond measured ranks by the ring.

        A send takes as long as a pair's all-gather of twice the bytes, in which each half
        crosses once.
        """
        size, count = np.asarray(size_bytes, dtype=np.float64), np.asarray(ranks, dtype=np.float64)
        stands = op if op in self.grids else _STANDS_FOR.get(op, op)
        if stands != op:
            pair = self.at(stands, size * 2, np.full(count.shape, 2.0))
            return Timing(pair.s, np.ones(pair.s.shape, dtype=bool))
        grid = self.grids[op]
        most = grid.axes[0][-1]
        inside = np.clip(count, grid.axes[0][0], most)
        timing = grid.at(inside, np.maximum(size, 1.0))
        ring = ((count - 1) / np.maximum(count, 1)) / ((inside - 1) / inside)
        s = np.where(count > most, timing.s * ring, timing.s)
        return Timing(s, timing.extrapolated | (count > most))


def curve_of_rows(rows: list[tuple[str, int, int, float]], bytes_per_s: float) -> CollectiveCurve:
    """A curve from rows of op, ranks, bytes and seconds; repeats are averaged."""
    points: dict[str, dict[tuple[float, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    for op, ranks, size, s in rows:
        points[op][float(ranks), float(size)].append(s)
    return CollectiveCurve({op: build_grid(cells) for op, cells in points.items()}, bytes_per_s)


def nccl_rows(name: str) -> list[tuple[str, int, int, float]]:
    """The shipped points of one device: op, ranks, bytes, seconds."""
    return [
        (row["op"], int(row["ranks"]), int(row["bytes"]), float(row["us"]) * 1e-6)
        for row in read_table(f"nccl_{name}.csv")
    ]
