"""Watch a model in few bits along a stream of labelled samples; calibrate it anew when it drifts.

Why
    Ends and formats were chosen on samples of one time. Where inputs shift, they are clipped, and
    the model loses what fp32 would not.

What it decides
    Samples come in windows, in order of time. Each window is scored by both models. The monitor
    fires where the loss over the last windows exceeds the budget by three deviations, or where a
    layer clips far more of its inputs than on the samples it was calibrated on. Then the ends are
    chosen anew from this window; if that is not enough, so are the formats. Both cost no training.

Kept true (tests/unit/recsys/lowbit/test_request.py)
    It is silent on a stream that does not shift, fires in the window in which inputs shift, and
    the loss is within the budget again afterwards.

Sources
    arXiv:2105.12676, section 3: continuous monitoring of accuracy.
"""

from dataclasses import dataclass, field

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.recsys.lowbit.layers import rounded_of
from equipoise.recsys.lowbit.parts import Forms, make_scorer
from equipoise.recsys.lowbit.scan import ReferenceScores, Sampled, log_losses
from equipoise.recsys.lowbit.search import Searched, search_forms
from equipoise.recsys.rank.scorer import Scorer

_DEVIATIONS = 3.0
_ROLLING = 3
"""Windows whose loss is taken together."""
_MORE_CLIPPED, _LEAST_CLIPPED = 4.0, 0.01
"""Clipped inputs that are too many: times those of calibration, and as a share on top."""


@dataclass(frozen=True, slots=True)
class WindowSeen:
    """What the monitor saw in one window."""

    window: int
    samples: int
    entropy: float
    """Relative loss of normalised entropy in this window alone, before anything was changed."""
    rolling: float
    """The same over the last windows."""
    clipped: float
    """The largest share of a layer's inputs that were clipped."""
    fired: str
    """``""``, ``loss`` or ``inputs``."""
    did: str
    """``""``, ``ends`` or ``formats``: what was chosen anew."""
    entropy_after: float
    """The window's loss by the model that goes on."""


@dataclass(slots=True, eq=False)
class DriftMonitor:
    """Follows a stream."""

    reference: Scorer
    """The model in fp32."""
    scorer: Scorer
    """The model in few bits, replaced where the monitor fires."""
    forms: Forms
    budget: float
    searched: Searched | None = None
    """The last search for formats, of the window in which the monitor fired."""
    seen: list[WindowSeen] = field(default_factory=list)
    _calibrated: dict[str, float] = field(default_factory=dict)
    """Share of clipped inputs of each layer where it was calibrated."""
    _recent: list[tuple[Floats, Floats]] = field(default_factory=list)
    """Differences of log losses, and fp32's log losses, of the last windows."""

    def calibrated_on(self, samples: Sampled) -> None:
        """Note what layers clip of the samples that ends were chosen on."""
        self._calibrated = _clipped(self.scorer, samples)[1]

    def follow(self, samples: Sampled) -> WindowSeen:
        """Take the stream's next window.

        Raises:
            DataError: it is empty.
        """
        held = ReferenceScores(self.reference, samples)
        logits, clipped = _clipped(self.scorer, samples)
        differences = log_losses(logits, samples.labels) - held.losses
        self._recent = [*self._recent[1 - _ROLLING :], (differences, held.losses)]
        rolling, deviation = self._rolling()
        loss, did = held.loss_of(logits), ""
        after = loss.entropy
        fired = "loss" if rolling - _DEVIATIONS * deviation > self.budget else ""
        if any(
            share > _MORE_CLIPPED * self._calibrated.get(name, 0.0) + _LEAST_CLIPPED
            for name, share in clipped.items()
        ):
            fired = fired or "inputs"
        if fired:
            did, after = self._calibrate(held)
            self._recent = []
        row = WindowSeen(
            len(self.seen),
            len(samples.labels),
            loss.entropy,
            rolling,
            max(clipped.values(), default=0.0),
            fired,
            did,
            after,
        )
        self.seen.append(row)
        return row

    def _rolling(self) -> tuple[float, float]:
        """The loss over the last windows, and its deviation."""
        differences = np.concatenate([each for each, _ in self._recent])
        mean = float(np.concatenate([each for _, each in self._recent]).mean())
        spread = float(differences.std()) / len(differences) ** 0.5
        return float(differences.mean()) / mean, spread / mean

    def _calibrate(self, held: ReferenceScores) -> tuple[str, float]:
        """Choose ends anew on this window; formats too, where that is not enough."""
        did = "ends"
        self.scorer = make_scorer(self.reference, self.forms, held.ends)
        loss = held.measure(self.scorer)
        if loss.entropy - _DEVIATIONS * loss.deviation > self.budget:
            did, searched = "formats", search_forms(held, self.budget)
            self.scorer, self.forms, loss = searched.scorer, searched.forms, searched.loss
            self.searched = searched
        self.calibrated_on(held.samples)
        return did, loss.entropy


def _clipped(scorer: Scorer, samples: Sampled) -> tuple[Floats, dict[str, float]]:
    """Logits, and the share of its inputs that each int8 layer clipped."""
    layers = {n: each for n, each in rounded_of(scorer.dense).items() if each.form == "int8"}
    for each in layers.values():
        each.clipped, each.seen, each.is_watched = 0, 0, True
    logits = scorer.score(samples.jagged, samples.numbers).double().numpy()
    for each in layers.values():
        each.is_watched = False
    return logits, {n: each.clipped / max(1, each.seen) for n, each in layers.items()}
