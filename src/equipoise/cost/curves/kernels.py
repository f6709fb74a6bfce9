"""Measured kernels of one device: matrix products and attention, as grids over sizes."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.cost.curves.grid import STAYS_THEN_GROWS, LogGrid, Timing, build_grid

_IN_PROPORTION = (1.0, 1.0)
_STAYS = (0.0, 0.0)
_AS_SQUARE = (0.0, 2.0)


@dataclass(frozen=True, slots=True)
class AttentionCurve:
    """Seconds of causal attention over head width, sharing, document length and units.

    *Sharing* is query heads per key/value head. A *unit* is one head of one document. A GPU
    computes many units at once, so their number is an axis of its grid. A core computes one after
    the other with keys and values in its cache, so its grid has neither axis.
    """

    grid: LogGrid
    has_units: bool

    def unit_s(
        self,
        head_width: npt.ArrayLike,
        sharing: npt.ArrayLike,
        doc_tokens: npt.ArrayLike,
        units: npt.ArrayLike,
    ) -> Timing:
        """Seconds of one unit among ``units`` like it."""
        if not self.has_units:
            return self.grid.at(head_width, doc_tokens)
        count = np.maximum(np.asarray(units, dtype=np.float64), 1.0)
        together = self.grid.at(head_width, sharing, doc_tokens, count)
        return together.scaled(1 / count)


def gemm_grid(rows: Iterable[tuple[int, int, int, float]]) -> LogGrid:
    """A grid over m, n, k from rows of m, n, k and seconds."""
    points: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for m, n, k, s in rows:
        points[float(m), float(n), float(k)].append(s)
    return build_grid(points)


def attention_curve(
    rows: Iterable[tuple[int, int, int, int | None, float]],
) -> AttentionCurve:
    """A curve from rows of head width, sharing, tokens, units (or None) and seconds."""
    points: dict[tuple[float, ...], list[float]] = defaultdict(list)
    has_units = True
    for head_width, sharing, tokens, units, s in rows:
        has_units = units is not None
        place = (
            (head_width, tokens)
            if units is None
            else (
                head_width,
                sharing,
                tokens,
                units,
            )
        )
        points[tuple(map(float, place))].append(s)
    powers = [_IN_PROPORTION, _AS_SQUARE]
    if has_units:
        powers = [_IN_PROPORTION, _STAYS, _AS_SQUARE, STAYS_THEN_GROWS]
    return AttentionCurve(build_grid(points, powers), has_units)


def decode_grid(rows: Iterable[tuple[int, int, int, float]]) -> LogGrid:
    """A grid over sharing, cached tokens and units from rows of those and seconds."""
    points: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for sharing, tokens, units, s in rows:
        points[float(sharing), float(tokens), float(units)].append(s)
    return build_grid(points, [_STAYS, STAYS_THEN_GROWS, STAYS_THEN_GROWS])
