"""Which choice to measure next: a search whose price is a real run, and whose runs may fail.

Why
    No price knows a machine as its own seconds do, and to measure every choice costs more than
    the choice saves. Some choices do not even run: they want more memory than there is, or a
    rank dies, and only the trial tells.

What it decides
    The next choice, from the trials so far and nothing else: first the one of the lowest price,
    then the one that is expected to improve most on the best, by ``plan.measured.surrogate``. A
    choice that failed counts as one of twice the slowest seconds measured, loosely, so that choices
    which share its settings are put off and not ruled out. Ties fall by the seed.

Kept true (tests/unit/plan/measured/test_next.py, by Hypothesis; bench/planner/measured_search.py)
    Each choice is tried once, whatever fails; a search that was stopped goes on as if it had not
    been; on drawn tables with failures it loses less than random search.

Sources
    Frontier study, arXiv:2312.12705: Bayesian search with failed runs as penalties.
    Expected improvement: Jones et al., Efficient Global Optimization (1998).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import SpecError
from equipoise.plan.measured.surrogate import Belief, believe

BUDGET = 0.25
"""Share of an exhaustive search's trials that a search may take."""

_NOISE = 0.02
"""Standard deviation of the logarithm of a trial's seconds."""

_FAILED_TIMES = 2.0
_FAILED_NOISE = 0.5
"""A failure says that a choice is bad, and nothing of how bad."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One choice that was tried."""

    choice: int
    step_s: float | None
    """Measured; None where the trial failed."""
    cause: str = ""
    """Of a failure: ``out of memory``, ``killed``, ``hang``, ``time limit`` and so on."""
    message: str = ""
    wall_s: float = 0.0
    """From its start to its end."""


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredSpace:
    """What can be measured."""

    settings: Ints
    """Which value of each dimension a choice has, int64[choices, dimensions]."""
    prior_s: Floats
    """What a simulator says of each; NaN where it has no price."""

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
                f"0, or NaN where there is no price."
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
        seed: Of ties.

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
