"""Drawn tables of what trials would measure, against which searches are replayed."""

from dataclasses import dataclass

import numpy as np

from equipoise.plan.measured.next import Floats, MeasuredSpace, Trial, best_trial, next_choice

SIZES = (4, 2, 3, 2)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    space: MeasuredSpace
    step_s: Floats
    """NaN where a choice fails."""

    def trial(self, choice: int) -> Trial:
        seconds = float(self.step_s[choice])
        return Trial(choice, None, "out of memory") if np.isnan(seconds) else Trial(choice, seconds)

    def regret(self, rows: np.ndarray) -> float:
        """Regret after trying these rows: their best over the best of all, minus 1."""
        seconds = self.step_s[rows]
        return float("inf") if np.isnan(seconds).all() else self._over(float(np.nanmin(seconds)))

    def search(self, seed: int, trials: int | None = None) -> list[Trial]:
        tried: list[Trial] = []
        while len(tried) < (self.space.budget if trials is None else trials):
            choice = next_choice(self.space, tried, seed=seed)
            if choice is None:
                break
            tried.append(self.trial(choice))
        return tried

    def search_regret(self, seed: int) -> float:
        best = best_trial(self.search(seed))
        return float("inf") if best is None else self._over(float(best.step_s or 0.0))

    def _over(self, step_s: float) -> float:
        return step_s / float(np.nanmin(self.step_s)) - 1.0


def draw_table(seed: int, *, off: float = 0.3, failing: float = 0.2) -> Table:
    """Settings that multiply, a little of each combination's own, and fast ones that need memory.

    Args:
        seed: Seeds every draw.
        off: Standard deviation of log(price / true seconds).
        failing: Share of choices that fail.
    """
    draw = np.random.default_rng(seed)
    settings = np.array(list(np.ndindex(*SIZES)))
    effects = [draw.normal(0, 0.25, size) for size in SIZES]
    wrong = [effect + draw.normal(0, off / 2, len(effect)) for effect in effects]
    logs = sum(effect[settings[:, at]] for at, effect in enumerate(effects))
    logs = logs + draw.normal(0, 0.08, len(settings))
    prices = 3.0 * np.exp(sum(effect[settings[:, at]] for at, effect in enumerate(wrong)))
    memory = sum(draw.normal(0, 1, size)[settings[:, at]] for at, size in enumerate(SIZES))
    memory = memory - logs + draw.normal(0, 0.3, len(settings))
    failed = memory > np.quantile(memory, 1 - failing)
    return Table(MeasuredSpace(settings, prices), np.where(failed, np.nan, np.exp(logs)))
