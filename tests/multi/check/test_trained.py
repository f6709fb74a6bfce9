"""Adapters and frozen weights: gradients of what is trained are one rank's, on every layout."""

import pytest

from equipoise.spec.model.presets import ModelSpec
from equipoise.train.check.partial import trained_cases
from equipoise.train.check.prove import run_cases

DENSE = ModelSpec(layers=3, hidden=32, heads=4, kv_heads=1, ffn=48, vocab=320, head_width=8)
TIED = ModelSpec(
    layers=2, hidden=32, heads=2, kv_heads=2, ffn=48, vocab=96, head_width=16, tied=True
)
SPARSE = ModelSpec(
    layers=2,
    hidden=32,
    heads=2,
    kv_heads=2,
    ffn=48,
    vocab=96,
    head_width=16,
    experts=4,
    top_k=2,
    expert_ffn=24,
)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", [DENSE, TIED, SPARSE], ids=["dense", "tied", "experts"])
def test_every_layout_trains_the_same_adapters_and_the_same_weights(model, ranks: int) -> None:
    # Each layout with adapters, then with frozen weights: one of both, in turn.
    first, cases = model is not TIED, trained_cases(ranks, model)
    cases = cases[first::4] + cases[3 - first :: 4]
    verdicts = run_cases(cases, over_gloo=model is DENSE)
    wrong = [each for each in verdicts if not each.is_exact]
    assert [(str(each.case), each.error, each.worst_parameter) for each in wrong] == []
