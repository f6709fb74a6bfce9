"""Predict how much a host's other work slows a rank, and name the resource that it uses up.

Why
    A rank knows that a step took long, not how long it would have taken on a quiet host.

What it decides
    The share of its quiet speed that a rank has left follows from some seconds of host metrics by
    boosted trees, which won against ridge and a dual-branch transformer on kinds of neighbours
    that none of them had seen (docs: Bit flips and noisy neighbours). The trees are arrays in
    ``model.npz``, with the scale of each metric.

    The resource is the one whose metrics stand highest above this rank's own calm (the tenth
    percentile of its rows), by the mean of its three highest: this needs no examples of any kind
    of neighbour, and named more of those that were held out than classifiers did.

Kept true (tests/unit/fault/interference/test_predict.py)
    Recorded seconds are predicted within the error that the comparison printed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.fault.interference.features import (
    CALM_QUANTILE,
    WINDOW,
    Scale,
    flatten,
    relative,
)
from equipoise.fault.interference.metrics import METRICS, RESOURCES, Resource

_FILE = Path(__file__).with_name("model.npz")
_DEPTH = 3
_HIGHEST = 3
_LOWEST_SPEED = 0.02
_GROUPS = {
    resource: [at for at, each in enumerate(METRICS.values()) if each == resource]
    for resource in RESOURCES
}


@dataclass(frozen=True, slots=True)
class Trees:
    """Boosted trees of depth 3 as arrays: each split reads one feature."""

    base: float
    features: Ints
    """int64 [trees, 7], breadth first."""
    thresholds: Floats
    """float64 [trees, 7]; a larger feature goes right."""
    leaves: Floats
    """float64 [trees, 8]."""

    def predict(self, x: Floats) -> Floats:
        """Sums of leaves [n] of features [n, features]."""
        at = np.zeros((len(x), len(self.features)), dtype=np.int64)
        trees, rows = np.arange(len(self.features)), np.arange(len(x))[:, None]
        for _ in range(_DEPTH):
            is_right = x[rows, self.features[trees, at]] > self.thresholds[trees, at]
            at = 2 * at + 1 + is_right
        total: Floats = self.base + self.leaves[trees, at - (2**_DEPTH - 1)].sum(1)
        return total


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a host did to a rank in the last seconds."""

    speed: float
    """Share of the rank's speed on a quiet host, in (0, 1]."""
    resource: Resource
    """What is used up most, compared with calm; says little where the speed is near 1."""
    excess: dict[Resource, float]
    """How far each resource stands above calm, in deviations of the recorded seconds."""


@dataclass(frozen=True, slots=True)
class Predictor:
    """The shipped model."""

    trees: Trees
    scale: Scale

    @classmethod
    def load(cls) -> Self:
        """Read the model that is shipped."""
        with np.load(_FILE) as file:
            trees = Trees(float(file["base"]), file["features"], file["thresholds"], file["leaves"])
            return cls(trees, Scale(file["typical"], file["mean"], file["deviation"]))

    def predict(self, rows: Floats) -> Prediction:
        """Predict for the last second of a rank's rows.

        Args:
            rows: What its sampler saw since it started, in order, float64 [seconds, metrics]; at
                least ``WINDOW`` of them, and a minute or more to know what calm is.
        """
        scaled = self.scale.apply(relative(rows))
        window = scaled[None, -WINDOW:]
        speed = float(self.trees.predict(flatten(window))[0])
        excess = stands_out(window, calm_of(scaled))[0]
        return Prediction(
            min(1.0, max(_LOWEST_SPEED, speed)),
            RESOURCES[int(excess.argmax())],
            dict(zip(RESOURCES, excess.tolist(), strict=True)),
        )


def calm_of(scaled: Floats) -> Floats:
    """What a rank's metrics are in calm, from all of its scaled rows [n, metrics]: [metrics]."""
    calm: Floats = np.quantile(scaled, CALM_QUANTILE, axis=0)
    return calm


def stands_out(windows: Floats, calm: Floats) -> Floats:
    """How far each resource stands above calm in windows' last two seconds, [n, resources].

    Args:
        windows: Scaled, [n, seconds, metrics].
        calm: As ``calm_of`` has it, [metrics].
    """
    above = windows[:, -2:].mean(axis=1) - calm
    return np.stack(
        [np.sort(above[:, each], axis=1)[:, -_HIGHEST:].mean(axis=1) for each in _GROUPS.values()],
        axis=1,
    )
