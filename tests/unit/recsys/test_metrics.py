"""AUC and normalised entropy beside their definitions."""

import itertools

import numpy as np
import pytest

from equipoise.base.errors import DataError
from equipoise.recsys.metrics import measure_auc, measure_entropy


def test_auc_is_the_share_of_pairs_in_order() -> None:
    source = np.random.default_rng(0)
    for _ in range(20):
        scores = source.integers(0, 6, 30).astype(float)
        labels = (source.random(30) < 0.4).astype(float)
        pairs = [
            (p > n) + 0.5 * (p == n)
            for p, n in itertools.product(scores[labels > 0], scores[labels == 0])
        ]
        assert measure_auc(scores, labels) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_entropy_is_one_for_the_rate_itself_and_less_for_knowing() -> None:
    labels = np.array([1.0, 0.0, 0.0, 1.0, 0.0])
    rate = np.log(0.4 / 0.6)
    assert measure_entropy(np.full(5, rate), labels) == pytest.approx(1.0)
    assert measure_entropy(np.where(labels > 0, 2.0, -2.0), labels) < 0.3
    assert measure_entropy(np.where(labels > 0, -1e4, 1e4), labels) > 1e3


def test_one_class_is_refused() -> None:
    for metric in (measure_auc, measure_entropy):
        with pytest.raises(DataError) as error:
            metric(np.zeros(3), np.ones(3))
        assert str(error.value) == (
            "All 3 samples have the label 1, so nothing can be ranked. Choose a split that has "
            "both labels."
        )
