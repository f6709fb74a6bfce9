"""Seconds measured on a grid of sizes, interpolated in log-log.

Why
    Between two measured sizes time is close to a power of size, so log-log interpolation errs by
    a few percent where formulas err by tens. Beyond the last size it is a guess, and must say so.

What it decides
    Multilinear interpolation of log seconds over log sizes. Beyond the largest size of an axis
    time grows with a power of the size, usually the first; below the smallest it stays constant,
    because only latency is left, unless the axis says otherwise. Both are flagged.

Kept true (tests/unit/cost/curves/test_grid.py, by Hypothesis)
    Measured points and power laws are reproduced exactly; time is monotonic where the grid is;
    the flag is set outside the grid and nowhere else.
"""

import bisect
import csv
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.base.arrays import Flags, Floats


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, and whether they rest on sizes outside all measurements."""

    s: Floats
    extrapolated: Flags

    def scaled(self, factor: npt.ArrayLike) -> "Timing":
        """The same timing multiplied by ``factor``."""
        s = self.s * np.asarray(factor, dtype=np.float64)
        return Timing(s, np.broadcast_to(self.extrapolated, s.shape))

    def __add__(self, other: "Timing") -> "Timing":
        return Timing(self.s + other.s, self.extrapolated | other.extrapolated)

    @property
    def total_s(self) -> float:
        """Sum of all seconds."""
        return float(self.s.sum())


def counted(s: npt.ArrayLike) -> Timing:
    """Seconds from a formula; all flagged, since nothing was measured."""
    seconds = np.asarray(s, dtype=np.float64)
    return Timing(seconds, np.ones(seconds.shape, dtype=bool))


@dataclass(frozen=True, slots=True)
class LogGrid:
    """Measured seconds on the product of the axes' sizes."""

    axes: tuple[tuple[float, ...], ...]
    """Sizes along each axis, ascending."""
    log_s: Floats
    """Natural logarithm of seconds, one dimension per axis."""
    powers: tuple[tuple[float, float], ...]
    """Powers of the size with which time grows below and beyond each axis."""

    def at(self, *sizes: npt.ArrayLike) -> Timing:
        """Seconds at sizes, one array per axis; arrays broadcast.

        Cost: about 0.1 us for a point of two axes, 0.2 us of three.
        """
        wanted = [np.asarray(each, dtype=np.float64) for each in sizes]
        places = [
            _alone(axis, powers, float(values)) if not values.ndim else _place(axis, powers, values)
            for axis, powers, values in zip(self.axes, self.powers, wanted, strict=True)
        ]
        shape = np.broadcast_shapes(*(each.shape for each in wanted))
        total: Any = np.zeros(shape) if shape else 0.0
        for corner in itertools.product(*(each.sides for each in places)):
            weight: Any = 1.0
            for _, part in corner:
                weight = weight * part
            total += weight * self.log_s[tuple(at for at, _ in corner)]
        outside, beyond = places[0].outside, places[0].beyond
        for each in places[1:]:
            outside, beyond = outside | each.outside, beyond * each.beyond
        return Timing(np.exp(total) * beyond, np.broadcast_to(outside, shape))

    def least_s(self) -> float:
        """The fastest point: the fixed cost [s]."""
        return float(np.exp(self.log_s.min()))


@dataclass(frozen=True, slots=True)
class _Place:
    """The positions of sizes on one axis."""

    sides: tuple[tuple[Any, Any], ...]
    """Measured neighbours with their weights; those of weight 0 everywhere are left out."""
    outside: Any
    beyond: Any
    """Factor by which time grows outside the axis."""


@functools.lru_cache(maxsize=256)
def _logs(axis: tuple[float, ...]) -> tuple[Floats, list[float]]:
    logs = np.log(np.asarray(axis))
    return logs, logs.tolist()


def _place(axis: tuple[float, ...], powers: tuple[float, float], values: Floats) -> _Place:
    first, last = axis[0], axis[-1]
    below, above = powers
    beyond = np.maximum(values / last, 1.0) ** above
    if below:
        beyond = beyond * np.minimum(values / first, 1.0) ** below
    outside = (values < first) | (values > last)
    if len(axis) == 1:
        return _Place(((0, 1.0),), outside, beyond)
    logs, _ = _logs(axis)
    inside = np.log(np.clip(values, first, last))
    low = np.clip(np.searchsorted(logs, inside, side="right") - 1, 0, len(logs) - 2)
    part = (inside - logs[low]) / (logs[low + 1] - logs[low])
    return _Place(((low, 1.0 - part), (low + 1, part)), outside, beyond)


def _alone(axis: tuple[float, ...], powers: tuple[float, float], value: float) -> _Place:
    """``_place`` of a single size, in a tenth of the time."""
    first, last = axis[0], axis[-1]
    below, above = powers
    beyond: Any = np.float64(max(value / last, 1.0)) ** above
    if below:
        beyond = beyond * np.float64(min(value / first, 1.0)) ** below
    outside = value < first or value > last
    if len(axis) == 1:
        return _Place(((0, 1.0),), outside, beyond)
    _, logs = _logs(axis)
    inside = float(np.log(min(max(value, first), last)))
    low = min(max(bisect.bisect_right(logs, inside) - 1, 0), len(logs) - 2)
    part = (inside - logs[low]) / (logs[low + 1] - logs[low])
    sides = ((low, 1.0 - part), (low + 1, part))
    return _Place(tuple(side for side in sides if side[1]), outside, beyond)


STAYS_THEN_GROWS = (0.0, 1.0)
"""Powers of most axes: constant below, proportional beyond."""


def build_grid(
    points: Mapping[tuple[float, ...], Sequence[float]],
    powers: Sequence[tuple[float, float]] | None = None,
) -> LogGrid:
    """Build a grid from seconds at each combination of sizes; repeats are averaged in the log.

    Combinations may be missing along the last axis. Those before the first measured size take
    its time, since the device was not full; those after a measured size take proportionally
    longer, since sizes beyond memory had long filled the device.

    Raises:
        ValueError: nothing was measured along the last axis.

    >>> build_grid({(1, 8): [1.0, 4.0], (1, 16): [4.0]}).at(1, 32).s.tolist()
    8.0
    """
    axes = tuple(tuple(sorted(set(values))) for values in zip(*points, strict=True))
    last = np.array(axes[-1])
    log_s = np.empty([len(axis) for axis in axes])
    for place in itertools.product(*(range(len(axis)) for axis in axes[:-1])):
        sizes = tuple(axis[index] for axis, index in zip(axes[:-1], place, strict=True))
        known = [i for i, size in enumerate(axes[-1]) if (*sizes, size) in points]
        if not known:
            raise ValueError(f"nothing was measured at the sizes {sizes}")
        logs = np.array([np.mean(np.log(points[(*sizes, axes[-1][i])])) for i in known])
        at = np.searchsorted(known, np.arange(len(last)), side="right") - 1
        near = np.maximum(at, 0)
        grown = np.log(last / last[np.array(known)[near]])
        log_s[place] = logs[near] + np.maximum(grown, 0.0)
    return LogGrid(axes, log_s, tuple(powers or [STAYS_THEN_GROWS] * len(axes)))


@functools.cache
def read_table(name: str) -> tuple[dict[str, str], ...]:
    """The rows of a table that the package ships, without its comment lines; none without it."""
    file = _table_file(name)
    text = "" if file is None else file.read_text(encoding="utf-8")
    return tuple(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def _table_file(name: str) -> Traversable | None:
    data = resources.files("equipoise.cost") / "data"
    files = (data / name, data / "accelerators" / name)
    return next((file for file in files if file.is_file()), None)


def provenance(name: str) -> str:
    """Where a shipped table comes from: its comment lines, joined."""
    file = _table_file(name)
    text = "" if file is None else file.read_text(encoding="utf-8")
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return " ".join(line.lstrip("# ") for line in lines)
