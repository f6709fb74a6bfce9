"""Between which ends a layer's inputs are rounded: those of least squared error.

Why
    One input far out would stretch all levels. Clipping it costs less than coarse levels for all
    the others.

What it decides
    On either side the end is the extreme input, or leaves one of four small shares beyond it. Of
    all pairs, the one whose rounding has the least squared error is taken.

Kept true (tests/unit/recsys/lowbit/test_layers.py)
    Never a greater squared error than from the least to the greatest input.

Sources
    arXiv:2105.12676, section 3: thresholds of least L2 error.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.base.arrays import Floats

_LEVELS = 255
_TAILS = (1e-5, 1e-4, 1e-3, 1e-2)
_MOST_TRIED = 1 << 15
_MOST_KEPT = 1 << 20


class _Inputs:
    """Keeps what a layer is given, each nth number once there are many."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.count, self.every = 0, 1

    def note(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        del module
        flat = args[0].detach().flatten()
        self.parts.append(flat[:: self.every].clone())
        self.count += len(self.parts[-1])
        if self.count > _MOST_KEPT:
            self.parts = [each[::2] for each in self.parts]
            self.count, self.every = sum(map(len, self.parts)), 2 * self.every


@contextmanager
def noted_inputs(layers: dict[str, nn.Linear]) -> Iterator[dict[str, _Inputs]]:
    """Keep what layers are given while the block lasts."""
    kept = {name: _Inputs() for name in layers}
    hooks = [each.register_forward_pre_hook(kept[name].note) for name, each in layers.items()]
    try:
        yield kept
    finally:
        for each in hooks:
            each.remove()


def ends_of(kept: _Inputs) -> tuple[float, float]:
    """The ends of least squared error; 0 to 1 where nothing was given."""
    if not kept.parts:
        return 0.0, 1.0
    return choose_ends(torch.cat(kept.parts).double().numpy())


def choose_ends(inputs: Floats) -> tuple[float, float]:
    """The ends of least squared error for some inputs, of those at ``_TAILS`` from either side.

    >>> choose_ends(np.array([3.0, 3.0])), choose_ends(np.array([-4e8]))
    ((3.0, 4.0), (-400000000.0, -399999744.0))
    """
    low, high = float(inputs.min()), float(inputs.max())
    if not high > low:
        return low, low + max(1.0, 8 * float(np.spacing(np.float32(abs(low)))))
    some = np.concatenate((inputs[:: 1 + len(inputs) // _MOST_TRIED], [low, high]))
    lows = sorted({*np.quantile(some, _TAILS).tolist(), low})
    highs = sorted({*np.quantile(some, [1 - tail for tail in _TAILS]).tolist(), high})
    tried = [(first, last) for first in lows for last in highs if last > first]
    return min(tried, key=lambda ends: (_error(some, *ends), ends))


def _error(inputs: Floats, low: float, high: float) -> float:
    """Squared error of inputs that are rounded between two ends."""
    step = (high - low) / _LEVELS
    rounded = np.round((np.clip(inputs, low, high) - low) / step) * step + low
    return float(((rounded - inputs) ** 2).sum())
