"""Two sides of one run, step by step: the ratio of their seconds, and how sure it is.

Why
    A machine drifts by more within a minute than many packs differ, but two sides of a step are
    seconds apart, so that drift slows both alike. What is left from step to step is the error.

What it decides
    The ratio is that of the mean step's seconds: the mean of the steps' ratios, in which each
    counts by its time, so that it says how much time a run of such steps would save. Its 90%
    interval is Student's: the variance is that of the steps' residuals ``a - ratio * b``, on a
    logarithmic scale, where twice and half as fast are as far from 1. The first step of each
    session pays for warming up and is left out (``dash.summary``). Where the interval holds 1, no
    difference was measured.

Kept true (tests/unit/dash/test_paired.py)
    Student's quantiles are those of scipy; the interval covers the true ratio of drawn steps as
    often as it says.

Sources
    Variance of a ratio of means: Cochran, Sampling Techniques, 3rd edition, section 2.11.
    Student's distribution function in closed form: Abramowitz and Stegun, 26.7.3 and 26.7.4.
"""

import math
from dataclasses import dataclass

from equipoise.base.arrays import Floats

COVERAGE = 0.9
"""Share of samples whose interval holds the true ratio."""


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """How many times as long one side's steps take as the other's."""

    mean: float
    """The ratio of the mean step's seconds; NaN without a step."""
    low: float
    high: float
    """The interval's ends; NaN with fewer than two steps."""
    steps: int


def pair_steps(numerator_s: Floats, denominator_s: Floats) -> PairedRatio:
    """The ratio of two sides, step by step; steps that a side lacks are left out.

    Args:
        numerator_s: Seconds of each step, float64 [steps].
        denominator_s: Of the same steps under the other side, float64 [steps].

    >>> import numpy as np
    >>> both = pair_steps(np.array([2.0, 4.0, 2.0]), np.array([1.0, 2.0, 1.0]))
    >>> both.mean, both.low, both.high, both.steps
    (2.0, 2.0, 2.0, 3)
    """
    known = (numerator_s > 0) & (denominator_s > 0)  # false for NaN
    numerator_s, denominator_s = numerator_s[known], denominator_s[known]
    count = int(numerator_s.size)
    if not count:
        return PairedRatio(math.nan, math.nan, math.nan, 0)
    ratio, spread = float(numerator_s.sum() / denominator_s.sum()), math.nan
    if count > 1:
        residuals_s = numerator_s - ratio * denominator_s
        error = math.sqrt(float(residuals_s @ residuals_s) / (count * (count - 1)))
        relative = error / float(numerator_s.mean())
        spread = math.exp(student_quantile((1 + COVERAGE) / 2, count - 1) * relative)
    return PairedRatio(ratio, ratio / spread, ratio * spread, count)


def student_quantile(share: float, freedom: int) -> float:
    """The value that a share of Student's distribution lies below, for shares from one half.

    >>> round(student_quantile(0.95, 1), 4), round(student_quantile(0.95, 11), 4)
    (6.3138, 1.7959)
    """
    low, high = 0.0, 1.0
    while _within(high, freedom) < 2 * share - 1:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if _within(middle, freedom) < 2 * share - 1:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _within(value: float, freedom: int) -> float:
    """The share of Student's distribution between ``-value`` and ``value``."""
    angle = math.atan(value / math.sqrt(freedom))
    cosine, term, total = math.cos(angle), 1.0, 0.0
    first = freedom % 2
    for power in range(first, freedom - 1, 2):
        total += term * cosine**power
        term *= (power + 1) / (power + 2)
    if first:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
