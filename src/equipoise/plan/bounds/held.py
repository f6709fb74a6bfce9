"""Layers on ranks of several kinds: what a rank takes of some, and all ranks of all.

What it decides
    Nothing: of so many layers on one rank the lightest say what it takes at least, and the heaviest
    what they hide at most.

Kept true (tests/unit/plan/search/test_classes.py)
    The least worst is that of all ways to share layers out.
"""

from collections.abc import Sequence

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.sim.parts import BatchParts


def least_worst(times: Sequence[Floats], counts: Sequence[int], layers: int) -> float:
    """The least time within which ranks of several kinds hold so many layers together.

    Args:
        times: Of each kind, what a rank with 0, 1, .. layers takes; never less of more, from 0.
        counts: Ranks of each kind.
        layers: To be held.

    >>> import numpy as np
    >>> least_worst([np.arange(7) * 2.0, np.arange(7) * 1.0], [1, 1], 6)
    4.0
    """
    values = np.unique(np.concatenate(times))
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        held = sum(
            count * (int(np.searchsorted(each, values[middle], side="right")) - 1)
            for each, count in zip(times, counts, strict=True)
        )
        low, high = (low, middle) if held >= layers else (middle + 1, high)
    return float(values[low])


def layer_passes(parts: BatchParts) -> Floats:
    """Seconds of every layer's passes, float64 [layers, 3]."""
    kinds = {id(layer): layer.sum(axis=1) for layer in parts.layers}
    return np.array([kinds[id(layer)] for layer in parts.layers])


def lightest_s(seconds: Floats) -> Floats:
    """Of the n lightest layers together, float64 [layers + 1]."""
    return np.concatenate(([0.0], np.cumsum(np.sort(seconds))))


def hiding_s(parts: BatchParts, passes: slice) -> Floats:
    """Of the n heaviest layers and both ends, float64 [layers + 1] [s]."""
    heaviest = np.sort(layer_passes(parts)[:, passes].sum(axis=1))[::-1]
    ends = float(parts.first[passes].sum() + parts.last[passes].sum())
    return ends + np.concatenate(([0.0], np.cumsum(heaviest)))
