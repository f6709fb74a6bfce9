"""Rows of metrics as what a predictor reads: a few seconds, on scales that machines share.

What it decides
    Rates span many orders of magnitude, so they enter as inverse hyperbolic sines of multiples of
    a typical value. Probes are times of this machine, so they enter relative to its calm: the
    tenth percentile of all rows so far. A metric that this kernel lacks enters as its mean.

Kept true (tests/unit/fault/interference/test_features.py)
    A machine on which every probe takes twice as long has the same features.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.fault.interference.metrics import METRICS

WINDOW = 4
"""Seconds that a prediction reads, the last of which it is for."""

CALM_QUANTILE = 0.1
"""The quantile of a rank's rows, metric by metric, that is its calm."""

_PROBES = [at for at, name in enumerate(METRICS) if name.startswith("probe_")]


def relative(rows: Floats) -> Floats:
    """Rows [n, metrics] of one process with its probes as multiples of their calm values."""
    rows = np.array(rows, dtype=np.float64)
    for probe in _PROBES:
        known = rows[np.isfinite(rows[:, probe]), probe]
        if len(known):
            rows[:, probe] /= max(float(np.quantile(known, CALM_QUANTILE)), 1e-9)
    return rows


@dataclass(frozen=True, slots=True)
class Scale:
    """How rows become numbers around zero, learned from rows that were recorded."""

    typical: Floats
    mean: Floats
    deviation: Floats

    @classmethod
    def learn(cls, rows: Floats) -> Self:
        """From relative rows [n, metrics]."""
        typical = np.nanmean(np.abs(rows), axis=0) + 1e-9
        squeezed = np.arcsinh(rows / typical)
        return cls(typical, np.nanmean(squeezed, axis=0), np.nanstd(squeezed, axis=0) + 1e-3)

    def apply(self, rows: Floats) -> Floats:
        """Relative rows as numbers around zero, float64 [n, metrics]."""
        scaled = (np.arcsinh(rows / self.typical) - self.mean) / self.deviation
        return np.clip(np.nan_to_num(scaled), -4, 4)


def flatten(windows: Floats) -> Floats:
    """Features [n, 2 metrics] of windows [n, seconds, metrics]: the last second, and the mean."""
    return np.concatenate((windows[:, -1], windows.mean(axis=1)), axis=1)
