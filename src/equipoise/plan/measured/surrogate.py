"""What a few measured choices say of the others: a Gaussian process over a simulator's prices.

Why
    Measuring a choice costs a start of all ranks. A simulator's prices order choices for nothing,
    but are off by a factor that nobody knows and by parts that no model has. So only the rest,
    the logarithm of measured over priced, is learnt, from choices that share settings.

What it decides
    How far a choice is likely to be off and how sure that is. Choices are alike by the settings
    they share: half of the variance belongs to settings one by one, half to their combination.
    Prices need not be true, nor their spread: their factor is free and their slope is learnt. How
    much choices differ at all is not chosen but averaged over, by what the measurements say.

Kept true (tests/unit/plan/measured/test_surrogate.py)
    Measured choices are answered by what was measured; another scale of seconds changes nothing.

Sources
    Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), algorithm 2.1.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Floats, Ints

_SPREADS = np.array([0.05, 0.1, 0.2, 0.4, 0.8])
"""Standard deviations that are averaged over: of the logarithm of what no price knew."""

_FACTOR = 1.0
"""Standard deviation of the logarithm of the prices' common factor, beside the mean measured."""

_SLOPE = 0.5
"""Standard deviation of the slope that measured seconds have over prices, less one."""


@dataclass(frozen=True, slots=True, eq=False)
class Belief:
    """Logarithms of seconds, one row for each spread and one column for each choice."""

    mean: Floats
    deviation: Floats
    weight: Floats
    """Of each spread, how likely it is; they add up to 1."""


def believe(settings: Ints, log_prior: Floats, rows: Ints, log_s: Floats, noise: Floats) -> Belief:
    """What is to be expected of all choices after some were measured.

    Args:
        settings: Which value of each dimension a choice has, int64[choices, dimensions].
        log_prior: Logarithm of each choice's price, float64[choices].
        rows: Choices that were measured, int64[measured], at least one.
        log_s: Logarithm of what was measured [s].
        noise: Its standard deviation.

    Cost: O(measured^3 + choices * measured^2).

    >>> settings = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    >>> at = np.array([0, 1])
    >>> found = believe(settings, np.zeros(4), at, np.log([1.0, 2.0]), np.full(2, 0.01))
    >>> np.exp(found.weight @ found.mean).round(1).tolist()
    [1.0, 2.0, 1.1, 1.8]
    """
    rest = log_s - log_prior[rows]
    middle = float(np.median(rest))
    lean = log_prior - log_prior.mean()
    same = settings[:, None, :] == settings[None, rows, :]
    alike = 0.5 * same.mean(-1) + 0.5 * np.exp(-(~same).sum(-1))
    shared = _FACTOR**2 + _SLOPE**2 * np.outer(lean, lean[rows])
    own = _FACTOR**2 + _SLOPE**2 * lean**2
    means, deviations, likely = [], [], []
    for spread in _SPREADS:
        across = shared + spread**2 * alike
        lower = np.linalg.cholesky(across[rows] + np.diag(noise**2))
        whitened = np.linalg.solve(lower, np.column_stack([rest - middle, across.T]))
        told, reach = whitened[:, 0], whitened[:, 1:]
        means.append(log_prior + middle + told @ reach)
        deviations.append(np.sqrt(np.maximum(own + spread**2 - (reach**2).sum(0), 1e-12)))
        likely.append(-0.5 * told @ told - np.log(np.diag(lower)).sum())
    weight = np.exp(np.array(likely) - max(likely))
    return Belief(np.array(means), np.array(deviations), weight / weight.sum())
