"""Two sides of one run, step by step: the mean ratio of their seconds, and how sure it is.

Why
    A machine drifts by more within a minute than many packs differ, but two sides of a step are
    seconds apart. So their ratio is taken in each step, and its spread over steps is the error.

What it decides
    The mean is geometric, since 2 times and half as fast cancel. Its 90% interval is Student's, on
    the logarithms of the ratios; the first step of each session pays for warming up and is left
    out (``dash.summary``). Where the interval holds 1, no difference was measured.

Kept true (tests/unit/dash/test_paired.py)
    Student's quantiles are those of scipy; the interval covers the true ratio of drawn steps as
    often as it says.

Sources
    Student's distribution function in closed form: Abramowitz and Stegun, 26.7.3 and 26.7.4.
"""

import math
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Floats

COVERAGE = 0.9
"""Share of samples whose interval holds the true ratio."""


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """How many times as long one side's steps take as the other's."""

    mean: float
    """Geometric, over steps; NaN without a step."""
    low: float
    high: float
    """The interval's ends; NaN with fewer than two steps."""
    steps: int


def pair_steps(numerator_s: Floats, denominator_s: Floats) -> PairedRatio:
    """The ratio of two sides, step by step; steps that a side lacks are left out.

    Args:
        numerator_s: Seconds of each step, float64 [steps].
        denominator_s: Of the same steps under the other side, float64 [steps].

    >>> both = pair_steps(np.array([2.0, 4.0, 2.0]), np.array([1.0, 2.0, 1.0]))
    >>> both.mean, both.low, both.high, both.steps
    (2.0, 2.0, 2.0, 3)
    """
    known = (numerator_s > 0) & (denominator_s > 0)  # false for NaN
    logs = np.log(numerator_s[known] / denominator_s[known])
    count = int(logs.size)
    if not count:
        return PairedRatio(math.nan, math.nan, math.nan, 0)
    mean, half = float(logs.mean()), math.nan
    if count > 1:
        half = student_quantile((1 + COVERAGE) / 2, count - 1)
        half *= float(logs.std(ddof=1)) / math.sqrt(count)
    return PairedRatio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), count)


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
