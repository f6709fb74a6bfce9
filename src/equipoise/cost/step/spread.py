"""How sure a step's time is: a spread of each curve that priced it, and an interval of the step.

Why
    A forecast without an interval is believed too much where a curve is read far from where it was
    measured, and too little elsewhere.

What it decides
    What a step spends by a curve is off by one factor, since all of it was read off the same
    curve; factors of different curves are independent. So the relative spread of a step is the
    root of a sum of squares::

        spread^2 = sum over curves (share of the step * spread of the curve)^2

    Waiting for other stages is what they compute, so a bubble counts as the terms beside it. The
    interval is the forecast times and over ``exp(width * spread)``; as ratios, since nothing is
    too slow by more than all of it.

Kept true (tests/unit/cost/step/test_spread.py; coverage: bench/published/intervals.py)
    Shares add up to one; a step of one curve has its spread; more of a surer curve narrows the
    interval.

    Steps of this machine, whose parts were timed on it, have one spread of their own: 18 plans do
    not tell its curves apart.

Sources
    ``SPREADS`` and ``WIDTH``: published steps beside their forecasts, each under residuals of
    other sources (``bench/published/intervals.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

CURVES = {
    "matrix products": ("products", "experts"),
    "attention": ("attention",),
    "memory": ("element-wise", "gradient sums", "optimizer", "launches"),
    "messages": (
        "tensor traffic",
        "context traffic",
        "expert traffic",
        "parameter traffic",
        "data traffic",
        "redistribution",
        "offload traffic",
    ),
}
"""Terms of a step by the curve that priced them."""

SPREADS = {"matrix products": 0.055, "attention": 0.101, "memory": 0.073, "messages": 0.106}
"""Relative spread of each curve's factor [share]."""

WIDTH = 1.64
"""Spreads from a forecast to an end of its interval of 80%."""

SHARE = 0.8
"""Share of steps that lie in their intervals."""

OWN = 0.12
"""Logarithm of an end of the interval of a step on this machine over its forecast, after its parts
were timed: 80% of 18 plans of one decoder on two cores were nearer
(``bench/results/planner/real.json``, 2026-11-22). None of them was left out for it."""


@dataclass(frozen=True, slots=True)
class Spread:
    """What one curve adds to a step and to its uncertainty."""

    curve: str
    terms: tuple[str, ...]
    """What it priced in this step, largest first."""
    seconds: float
    """Its part of the step, waiting for other stages included."""
    spread_s: float
    """By how much they are off, one spread."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A step's time with its uncertainty."""

    step_s: float
    low_s: float
    high_s: float
    spreads: tuple[Spread, ...]
    """By curve, the largest uncertainty first."""


def curve_seconds(terms: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step by curve; what no curve priced is shared out among them.

    >>> curve_seconds({"products": 3.0, "attention": 1.0, "pipeline bubble": 4.0})
    {'matrix products': 6.0, 'attention': 2.0, 'memory': 0.0, 'messages': 0.0}
    """
    own = {curve: sum(terms.get(name, 0.0) for name in names) for curve, names in CURVES.items()}
    whole, priced = sum(terms.values()), sum(own.values())
    return {curve: seconds * whole / priced for curve, seconds in own.items()}


def step_spread(shares: Mapping[str, float], spreads: Mapping[str, float] = SPREADS) -> float:
    """Relative spread of a step, by its shares of each curve."""
    each = [spreads[curve] * share for curve, share in shares.items()]
    return float(np.hypot.reduce(each))


def step_interval(terms: Mapping[str, float]) -> Interval:
    """The interval in which 80% of steps lie.

    Args:
        terms: Seconds of a step by what they are spent on (``StepPrice.terms``).
    """
    step_s = sum(terms.values())
    by_curve = curve_seconds(terms)
    spread = step_spread({curve: seconds / step_s for curve, seconds in by_curve.items()})
    parts = [
        Spread(curve, _named(curve, terms), seconds, SPREADS[curve] * seconds)
        for curve, seconds in by_curve.items()
        if seconds
    ]
    factor = float(np.exp(WIDTH * spread))
    ordered = sorted(parts, key=lambda each: -each.spread_s)
    return Interval(step_s, step_s / factor, step_s * factor, tuple(ordered))


def own_interval(step_s: float) -> Interval:
    """The interval of a step whose parts were timed on this machine.

    >>> round(own_interval(2.0).low_s, 2), round(own_interval(2.0).high_s, 2)
    (1.77, 2.25)
    """
    factor = float(np.exp(OWN))
    return Interval(step_s, step_s / factor, step_s * factor, ())


def _named(curve: str, terms: Mapping[str, float]) -> tuple[str, ...]:
    names = [name for name in CURVES[curve] if terms.get(name)]
    return tuple(sorted(names, key=lambda name: -terms[name]))
