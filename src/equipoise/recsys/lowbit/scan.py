"""What each part's formats cost in normalised entropy, one part at a time.

What it decides
    A loss is relative: normalised entropy over that of fp32 on the same samples, less 1. Both have
    one denominator, so it is the mean difference of the samples' log losses over their mean, and
    its deviation is that of paired differences, far smaller than that of either entropy alone.

Kept true (tests/unit/recsys/lowbit/test_request.py)
    A part that stays fp32 loses nothing; a loss is that of a model made with this one format.

Sources
    Sensitivity scan: arXiv:2105.12676, section 3.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.base.arrays import Floats
from equipoise.base.errors import DataError
from equipoise.base.shown import counted
from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.lowbit.layers import linears_of
from equipoise.recsys.lowbit.parts import Ends, ModelPart, make_dense, make_table, parts_of
from equipoise.recsys.lowbit.ranges import ends_of, noted_inputs
from equipoise.recsys.rank.scorer import Scorer, run_tiles


@dataclass(frozen=True, slots=True)
class Loss:
    """What a model in few bits loses to fp32."""

    entropy: float
    """Relative, of normalised entropy."""
    deviation: float
    """Standard deviation of this mean over the samples."""
    noise_db: float
    """How far fp32's logits stand above their differences [dB]; inf if there are none."""


@dataclass(frozen=True, slots=True)
class PartLoss:
    """One format of one part, all others in fp32."""

    part: ModelPart
    form: str
    loss: Loss


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Samples with their labels."""

    jagged: KeyedJagged
    numbers: Tensor
    labels: Floats
    """0 or 1, float64 [B]."""


class ReferenceScores:
    """The fp32 model's scores of some samples, which those of others are held against."""

    def __init__(self, scorer: Scorer, samples: Sampled) -> None:
        """Score them, and choose between which ends each layer's inputs are rounded.

        Raises:
            DataError: there are no samples, or a score of theirs is not a number.
        """
        if not len(samples.labels):
            raise DataError("There are no samples to measure losses on. Give some.")
        self.scorer, self.samples = scorer, samples
        with torch.inference_mode():
            self.pooled = scorer.pool(samples.jagged)
            with noted_inputs(linears_of(scorer.dense)) as kept:
                logits = run_tiles(scorer.dense, self.pooled, samples.numbers)
        self.logits = logits.double().numpy()
        if bad := int(np.sum(~np.isfinite(self.logits))):
            raise DataError(
                f"Scores of {bad:,} of {counted(len(self.logits), 'sample')} are not numbers, so "
                "no loss can be measured. Leave out rows with numbers far from training's."
            )
        self.losses = log_losses(self.logits, samples.labels)
        self.ends: Ends = {name: ends_of(each) for name, each in kept.items()}

    def loss_of(self, logits: Floats) -> Loss:
        """What other logits of these samples lose."""
        mean = float(self.losses.mean())
        differences = log_losses(logits, self.samples.labels) - self.losses
        spread = float(differences.std()) / len(differences) ** 0.5
        noise = float(((logits - self.logits) ** 2).sum())
        power = float((self.logits**2).sum())
        decibels = 10 * float(np.log10(power / noise)) if noise and power else float("inf")
        return Loss(float(differences.mean()) / mean, spread / mean, decibels)

    def measure(self, other: Scorer) -> Loss:
        """What another model of the same columns loses."""
        scored = other.score(self.samples.jagged, self.samples.numbers)
        return self.loss_of(scored.double().numpy())


def log_losses(logits: Floats, labels: Floats) -> Floats:
    """The log loss of each sample, float64 [B]."""
    losses: Floats = np.logaddexp(0.0, logits) - labels * logits
    return losses


def scan_parts(reference: ReferenceScores) -> list[PartLoss]:
    """The loss of every format of every part, all others in fp32.

    Args:
        reference: The model and the samples.
    """
    return [
        PartLoss(part, form, reference.loss_of(_one(reference, part, form)))
        for part in parts_of(reference.scorer)
        for form in part.forms[1:]
    ]


@torch.inference_mode()
def _one(reference: ReferenceScores, part: ModelPart, form: str) -> Floats:
    """Logits with one part in a format."""
    scorer, samples = reference.scorer, reference.samples
    pooled, dense = reference.pooled, scorer.dense
    if part.is_table:
        begin = 0
        for table in scorer.tables:
            end = begin + table.table.width
            if table.table.name == part.name:
                pooled = pooled.clone()
                rounded = make_table(table, form)
                pooled[:, begin:end] = rounded.pool(*samples.jagged.bags(part.name))
            begin = end
    else:
        dense = make_dense(scorer.dense, {part.name: form}, reference.ends)
    return run_tiles(dense, pooled, samples.numbers).double().numpy()
