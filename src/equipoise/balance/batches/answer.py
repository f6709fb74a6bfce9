"""The answer of ``balance.batch``: who computes which samples when, and how even that is."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.base.digest import digest

Meets = Literal["each micro-batch", "the step's end", "a pipeline"]
"""Where ranks wait for each other."""


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """One step's micro-batches on every data-parallel rank, in the order in which they run."""

    pieces: tuple[tuple[Ints, ...], ...]
    """Pieces of each rank's micro-batches, int64 [n, 3]: sample, first token, one past the last.
    Samples that were not divided are whole pieces. A micro-batch may be empty only where
    ``may_be_empty`` was given: it stands for one token without a label."""
    tokens: Ints
    """Tokens of each micro-batch, int64 [ranks, micro-batches, kinds]; a prefix that is computed
    once counts once. 0 beyond a rank's last micro-batch."""
    seconds: Floats
    """Predicted forward and backward, float64 [ranks, micro-batches, phases] [s]; 0 beyond a
    rank's last micro-batch."""
    step_s: float
    """Predicted time until the last rank is done [s]."""
    bound_s: float
    """No assignment of these samples to these ranks takes less [s]."""
    meets: Meets
    """Where ranks wait for each other, as ``step_s`` counts it."""

    @property
    def micro_batches(self) -> list[list[list[int]]]:
        """Samples by index: ``micro_batches[rank][micro_batch]``."""
        return [[batch[:, 0].tolist() for batch in rank] for rank in self.pieces]

    @property
    def gap(self) -> float:
        """How much longer than the bound the step takes, at most: ``step / bound - 1``."""
        return max(0.0, self.step_s / self.bound_s - 1)

    @property
    def skew(self) -> float:
        """Heaviest rank over the mean, summed over a step's micro-batches [ratio]."""
        sums = self.seconds.sum(1)
        return _ratio(float(sums.max(0).sum()), float(sums.mean(0).sum()))

    @property
    def turn_skew(self) -> float:
        """Time of ranks that wait for each other in every micro-batch, over the mean [ratio]."""
        heaviest = self.seconds.max(0).sum()
        return _ratio(float(heaviest), float(self.seconds.sum(1).mean(0).sum()))

    @property
    def micro_batch_skews(self) -> list[float]:
        """Heaviest rank over the mean, micro-batch by micro-batch [ratio]."""
        turns = self.seconds.transpose(1, 0, 2)
        return [_ratio(float(t.max(0).sum()), float(t.mean(0).sum())) for t in turns]

    @property
    def digest(self) -> str:
        """Digest of the whole decision; equal on ranks that decided alike."""
        counts = np.array([len(rank) for rank in self.pieces])
        rows = [np.array([len(batch) for batch in rank]) for rank in self.pieces]
        return digest([counts, *rows, *(batch for rank in self.pieces for batch in rank)])


def _ratio(most: float, mean: float) -> float:
    return most / mean if mean else 1.0
