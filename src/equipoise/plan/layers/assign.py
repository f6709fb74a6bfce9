"""A strategy for each layer: least time within a memory, what moves between neighbours counted.

Why
    Taken one by one, the fastest strategies of all layers rarely fit, and the sparest waste time.
    Which layers give way, and where it is worth to change, is one question.

What it decides
    One strategy a layer. Strategies of one *kind* hand over alike, so the state is memory and
    kind, not memory and strategy::

        best[v, k] = least, over strategies s of kind k that take u <= v, of
                     time[s] + least over kinds j of (best'[v - u, j] + enter[j, k])

    Of equally fast ones, the last layers take the strategy that is listed first.

Kept true (tests/unit/plan/layers/test_assign.py, by Hypothesis)
    As fast as the fastest of all assignments, tried one by one; within the budget.

Sources
    The recurrence: Galvatron, arXiv:2211.13878, section 4.2. There tables are updated in place,
    which is wrong for a layer that takes no unit; here each layer has its own.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """A strategy of every layer."""

    strategies: Ints
    """int64 [layers]."""
    seconds: float
    """Of all layers, entering and leaving counted."""


def assign_strategies(
    seconds: Floats, units: Ints, kinds: Ints, enter: Floats, leave: Floats, *, budget: int
) -> Assignment | None:
    """Choose a strategy for each of some layers that follow each other.

    Args:
        seconds: Of each layer under each strategy, float64 [layers, strategies] [s].
        units: Memory of each, whole units of 0 or more, int64 [layers, strategies].
        kinds: Of each strategy, int64 [strategies].
        enter: From each kind to each, on the way into each layer, float64 [layers, kinds, kinds]
            [s]; what comes before the first layer is of kind 0.
        leave: From each kind to what comes after the last layer, float64 [kinds] [s].
        budget: Units that all layers may take.

    Returns:
        None where nothing fits.

    Cost: O(layers x budget x (strategies + kinds^2)), in NumPy.

    >>> time, memory = np.array([[1.0, 3.0]] * 3), np.array([[2, 1]] * 3)
    >>> found = assign_strategies(
    ...     time, memory, np.array([0, 0]), np.zeros((3, 1, 1)), np.zeros(1), budget=5
    ... )
    >>> found.strategies.tolist(), found.seconds
    ([1, 0, 0], 5.0)
    """
    layers, strategies = seconds.shape
    if budget < 0:
        return None
    best = np.full((budget + 1, len(leave)), np.inf)
    best[:, 0] = 0.0
    chosen = np.zeros((layers, budget + 1, len(leave)), dtype=np.int32)
    origin = np.zeros_like(chosen)
    for layer in range(layers):
        joined = best[:, :, None] + enter[layer]
        origin[layer] = joined.argmin(axis=1)
        entered = joined.min(axis=1)
        best = np.full_like(best, np.inf)
        for each in range(strategies):
            need, kind = int(units[layer, each]), int(kinds[each])
            if need > budget:
                continue
            time = entered[: budget + 1 - need, kind] + seconds[layer, each]
            is_less = time < best[need:, kind]
            best[need:, kind][is_less] = time[is_less]
            chosen[layer, need:, kind][is_less] = each
    last = best[budget] + leave
    kind, left = int(last.argmin()), budget
    if not np.isfinite(last[kind]):
        return None
    found = np.zeros(layers, dtype=np.int64)
    for layer in range(layers - 1, -1, -1):
        found[layer] = chosen[layer, left, kind]
        left -= int(units[layer, found[layer]])
        kind = int(origin[layer, left, kind])
    return Assignment(found, float(last.min()))
