"""Every run of layers that a stage may have, as tables; and the best of all splits into runs.

Why
    126 layers have 8,000 runs, most of them far too long for any of 64 stages. Tables indexed by
    where runs end, as wide as the longest useful run, are a tenth of that.

What it decides
    Dynamic programming over stages: the least cost up to each layer. Ties go to the split with
    more layers on later stages.

Kept true (tests/unit/balance/test_stage.py, by Hypothesis)
    The answer equals brute force.
"""

import numpy as np
import numpy.typing as npt

from equipoise.base.arrays import Floats, Ints

_ROUNDING = 1.0 + 1e-9
"""Tolerance for sums taken in another order."""


def longest_run(loads: Floats, pace: Floats, ends: Floats) -> int:
    """Layers of the longest run in any best split; longer ones are slower than equal runs.

    Args:
        loads: Load of each layer, float64 [layers >= stages].
        pace: Speed of each stage, float64 [stages].
        ends: Load of each stage beside its layers, float64 [stages].

    >>> longest_run(np.ones(8), np.ones(4), np.array([0, 0, 0, 1.5]))
    3
    """
    layers, stages = len(loads), len(pace)
    edges = np.arange(stages + 1) * layers // stages
    sums = np.concatenate(([0.0], np.cumsum(loads)))
    slowest = float(((np.diff(sums[edges]) + ends) / pace).max()) * _ROUNDING
    longest = -(-layers // stages)
    while longest < layers and (
        float((sums[longest + 1 :] - sums[: -longest - 1]).min()) <= slowest * pace.max()
    ):
        longest += 1
    return longest


class Runs:
    """Tables of each stage's runs of layers, indexed by end and by length, longest first."""

    def __init__(self, stages: int, layers: int, longest: int) -> None:
        self._stages, self._longest = stages, longest
        self._begins = np.arange(layers + 1)[:, None] - np.arange(longest, -1, -1)
        self._is_run = self._begins >= 0
        self._from = np.maximum(self._begins, 0)

    def sums(self, table: Floats, ends: Floats) -> Floats:
        """Sum of each run, float64 [stages, layers + 1, longest + 1]."""
        sums = np.concatenate((np.zeros((len(table), 1)), np.cumsum(table, axis=1)), axis=1)
        runs: Floats = sums[:, :, None] - sums[:, self._from] + ends[:, None, None]
        return runs

    def legal(self, *, empty_ends: bool) -> npt.NDArray[np.bool_]:
        """Whether a stage may have a run, bool [stages, layers + 1, longest + 1]."""
        least = np.ones((self._stages, 1, 1))
        if empty_ends:
            least[[0, -1]] = 0
        legal: npt.NDArray[np.bool_] = np.arange(self._longest, -1, -1) >= least
        return legal & self._is_run

    def least_edges(self, costs: Floats, join: np.ufunc) -> tuple[Ints, float]:
        """The split with the least sum or maximum of run costs; infinite costs are barred."""
        edges = len(self._begins)
        best = np.full(edges, np.inf)
        best[0] = 0.0
        begins = np.zeros((self._stages, edges), dtype=np.int64)
        at = np.arange(edges)
        for stage in range(self._stages):
            joined = join(best[self._from], costs[stage])
            best_place = joined.argmin(axis=1)
            begins[stage] = self._from[at, best_place]
            best = joined[at, best_place]
        chosen = np.zeros(self._stages + 1, dtype=np.int64)
        chosen[-1] = edges - 1
        for stage in range(self._stages - 1, -1, -1):
            chosen[stage] = begins[stage, chosen[stage + 1]]
        return chosen, float(best[-1])

    def chosen(self, costs: Floats, edges: Ints) -> Floats:
        """Costs of a split's own runs, float64 [stages]."""
        places = self._longest - np.diff(edges)
        own_costs: Floats = costs[np.arange(self._stages), edges[1:], places]
        return own_costs
