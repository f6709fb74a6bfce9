"""How well scores rank clicks: AUC, exact with ties, and normalised entropy.

What it decides
    Both are of all samples together: averages of ranks' own would be something else. Normalised
    entropy divides the log loss by that of always guessing the samples' own rate, so 1 is what
    knowing nothing reaches.

Kept true (tests/unit/recsys/test_metrics.py)
    AUC equals the share of pairs in order, ties by halves; a single class is refused.

Sources
    Normalised entropy: X. He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook".
"""

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.base.errors import DataError


def measure_auc(scores: Floats, labels: Floats) -> float:
    """The share of pairs of a positive and a negative that scores put in order.

    >>> measure_auc(np.array([0.1, 0.4, 0.4, 0.9]), np.array([0.0, 0.0, 1.0, 1.0]))
    0.875
    """
    _require_both(labels)
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2  # the mean place of equal scores
    positives = float(labels.sum())
    negatives = len(labels) - positives
    places = float(middle[inverse][labels > 0].sum())
    return (places - positives * (positives + 1) / 2) / (positives * negatives)


def measure_entropy(logits: Floats, labels: Floats) -> float:
    """Log loss over that of the samples' own rate.

    >>> labels = np.array([1.0, 0.0, 0.0, 0.0])
    >>> round(measure_entropy(np.full(4, np.log(1 / 3)), labels), 6)
    1.0
    """
    _require_both(labels)
    logits = np.asarray(logits, dtype=np.float64)
    loss = float(np.mean(np.logaddexp(0.0, logits) - labels * logits))
    rate = float(np.mean(labels))
    return float(loss / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def _require_both(labels: Floats) -> None:
    positives = int(np.sum(labels))
    if positives in (0, len(labels)):
        raise DataError(
            f"All {len(labels):,} samples have the label {int(positives > 0)}, so nothing can be "
            "ranked. Choose a split that has both labels."
        )
