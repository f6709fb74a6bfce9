"""Which choice to measure next: a search whose price is a real run, and whose runs may fail.

Why
    No price matches a machine's own seconds, and measuring every choice costs more than the choice
    saves. A simulator's prices order choices for nothing, but are off by a factor that
    nobody knows and by parts that no model has. Some choices do not even run: they want more memory
    than there is, or a rank dies, and only the trial shows it.

What it decides
    The next choice, from the trials so far and nothing else: first the one of the lowest price,
    then the one of the highest expected improvement on the best. A choice that failed counts as one
    of twice the slowest seconds measured, loosely, so that choices which share its settings are put
    off and not ruled out. Ties fall by the seed.

    The surrogate is a Gaussian process over the logarithm of measured over priced. Choices are
    alike by the settings they share: half of the variance belongs to settings one by one, half to
    their combination. Prices need not be true, nor their spread: their factor is free and their
    slope is learnt. How much choices differ at all is not chosen but averaged over, by what the
    measurements say.

Kept true (tests/unit/plan/measured/test_next.py, by Hypothesis; bench/planner/measured_search.py)
    Each choice is tried once, whatever fails; a search that was stopped goes on as if it had not
    been; on drawn tables with failures it loses less than random search. Predictions of measured
    choices are what was measured; another scale of seconds changes nothing (test_surrogate.py).

Sources
    Frontier study, arXiv:2312.12705: Bayesian search with failed runs as penalties.
    Expected improvement: Jones et al., Efficient Global Optimization (1998).
    Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), algorithm 2.1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import SpecError

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
    """Likelihood of each spread; they add up to 1."""


def believe(settings: Ints, log_prior: Floats, rows: Ints, log_s: Floats, noise: Floats) -> Belief:
    """Expected seconds of all choices after some were measured.

    Args:
        settings: Which value of each dimension a choice has, int64[choices, dimensions].
        log_prior: Logarithm of each choice's price, float64[choices].
        rows: Choices that were measured, int64[measured], at least one.
        log_s: Logarithm of what was measured [s].
        noise: Its standard deviation.

    Cost: O(measured^3 + choices * measured^2).

    >>> settings = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    >>> at = np.array([0, 1])
    >>> belief = believe(settings, np.zeros(4), at, np.log([1.0, 2.0]), np.full(2, 0.01))
    >>> np.exp(belief.weight @ belief.mean).round(1).tolist()
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
        misses, reach = whitened[:, 0], whitened[:, 1:]
        means.append(log_prior + middle + misses @ reach)
        deviations.append(np.sqrt(np.maximum(own + spread**2 - (reach**2).sum(0), 1e-12)))
        likely.append(-0.5 * misses @ misses - np.log(np.diag(lower)).sum())
    weight = np.exp(np.array(likely) - max(likely))
    return Belief(np.array(means), np.array(deviations), weight / weight.sum())


BUDGET = 0.25
"""Share of an exhaustive search's trials that a search may take."""

_NOISE = 0.02
"""Standard deviation of the logarithm of a trial's seconds."""

_FAILED_TIMES = 2.0
_FAILED_NOISE = 0.5
"""A failure shows that a choice is bad, but not how bad."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One choice that was tried."""

    choice: int
    step_s: float | None
    """Measured; None where the trial failed."""
    cause: str = ""
    """Why it failed: ``out of memory``, ``killed``, ``hang``, ``time limit`` and so on."""
    message: str = ""
    wall_s: float = 0.0
    """From its start to its end."""


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredSpace:
    """Choices that can be measured, and their prices."""

    settings: Ints
    """Which value of each dimension a choice has, int64[choices, dimensions]."""
    prior_s: Floats
    """A simulator's price of each choice [s]; NaN without one."""

    def __post_init__(self) -> None:
        if self.settings.ndim != 2 or len(self.settings) < 1:
            raise SpecError("A measured search over no choices. List at least one.")
        if self.prior_s.shape != self.settings.shape[:1]:
            raise SpecError(
                f"{len(self.prior_s):,} prices of {len(self.settings):,} choices. Give each choice "
                f"one, NaN where there is none."
            )
        wrong = np.flatnonzero(~np.isnan(self.prior_s) & ~(self.prior_s > 0))
        if len(wrong):
            raise SpecError(
                f"Choice {wrong[0]} is priced at {self.prior_s[wrong[0]]:g} s. Give seconds above "
                f"0, or NaN without a price."
            )

    @property
    def budget(self) -> int:
        """Most trials of a search: a quarter of the choices, at least one."""
        return max(1, int(BUDGET * len(self.settings)))

    @property
    def log_prior(self) -> Floats:
        """Logarithms of the prices; where there is none the middle one, and 0 without any."""
        logs = np.log(self.prior_s)
        known = logs[~np.isnan(logs)]
        return np.where(np.isnan(logs), np.median(known) if len(known) else 0.0, logs)


def next_choice(space: MeasuredSpace, trials: Sequence[Trial], *, seed: int = 0) -> int | None:
    """The choice to try next; None where all were tried.

    Args:
        space: Choices and their prices.
        trials: So far, in any order.
        seed: Breaks ties.

    Cost: O(trials^3 + choices * trials^2).

    >>> space = MeasuredSpace(np.array([[0], [1], [2]]), np.array([3.0, 2.0, 4.0]))
    >>> next_choice(space, []), next_choice(space, [Trial(1, None, "killed")])
    (1, 0)
    """
    tried = np.array([trial.choice for trial in trials], dtype=np.int64)
    left = np.setdiff1d(np.arange(len(space.settings)), tried)
    if not len(left):
        return None
    # A counter-based draw: the same trials and seed give the same ties, stopped or not.
    tie = np.random.default_rng((seed, len(trials))).random(len(left))
    worth = -space.log_prior[left] if not len(trials) else _worth(space, trials)[left]
    return int(left[np.lexsort((tie, -worth.round(12)))[0]])


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """The fastest; None where none has seconds."""
    measured = [trial for trial in trials if trial.step_s is not None]
    return min(measured, key=lambda trial: float(trial.step_s or 0.0), default=None)


def _worth(space: MeasuredSpace, trials: Sequence[Trial]) -> Floats:
    """What each choice is expected to gain on the best, in the logarithm of seconds."""
    prior = space.log_prior
    rows = np.array([trial.choice for trial in trials], dtype=np.int64)
    log_s = np.array([np.nan if t.step_s is None else np.log(t.step_s) for t in trials])
    failed = np.isnan(log_s)
    worst = log_s[~failed].max() if not failed.all() else prior.max()
    log_s = np.where(failed, worst + np.log(_FAILED_TIMES), log_s)
    noise = np.where(failed, _FAILED_NOISE, _NOISE)
    belief = believe(space.settings, prior, rows, log_s, noise)
    if failed.all():
        return -belief.weight @ belief.mean
    return _expected_improvement(belief, float(log_s[~failed].min()))


def _expected_improvement(belief: Belief, best: float) -> Floats:
    ahead = best - belief.mean
    score = ahead / belief.deviation
    density = np.exp(-0.5 * score**2) / np.sqrt(2 * np.pi)
    below = 0.5 * (1.0 + np.vectorize(math.erf)(score / math.sqrt(2.0)))
    gain: Floats = belief.weight @ (ahead * below + belief.deviation * density)
    return gain
