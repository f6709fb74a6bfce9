"""Ranks that share weights equal one rank: loss, logits, norm and every gradient, in float64."""

import dataclasses

import numpy as np
import pytest

from equipoise.base.errors import LayoutError
from equipoise.comm.local import run_ranks
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from support.ranks import tensor_ranks
from support.ranks.tensor_ranks import Found, Setting

# Nothing divides evenly: words, hidden units, tokens; 2 key/value heads for 6 query heads.
ODD = ModelSpec(
    layers=2,
    hidden=24,
    heads=6,
    kv_heads=2,
    ffn=50,
    vocab=97,
    head_width=4,
    qkv_bias=True,
    qk_norm=True,
)
TIED = dataclasses.replace(ODD, layers=1, heads=4, tied=True, qkv_bias=False, qk_norm=False)
# As many micro-batches for each of two data-parallel ranks; one has fewer tokens than ranks, one
# none at all.
BATCHES = [[37, 5, 1, 20], [11, 0, 2], [1], []]

SETTINGS = {
    1: [Setting(Layout())],
    2: [
        *(Setting(Layout(tp=2, zero=zero)) for zero in (0, 1, 2, 3)),
        Setting(Layout(tp=2, zero=3), recompute="full"),
    ],
    3: [Setting(Layout(tp=3, zero=0)), Setting(Layout(tp=3, zero=3))],
    4: [
        *(Setting(Layout(dp=2, tp=2, zero=zero)) for zero in (0, 1, 3)),
        Setting(Layout(dp=2, tp=2, zero=2, order=("tp", "pp", "cp", "dp"))),
        *(Setting(Layout(cp=2, tp=2, zero=zero)) for zero in (2, 3)),
        Setting(Layout(cp=2, tp=2, zero=1, order=("pp", "tp", "dp", "cp")), recompute="selective"),
        Setting(Layout(dp=2, tp=2, zero=3, replicas=2)),
        Setting(Layout(dp=4, zero=1, replicas=2)),
    ],
    6: [Setting(Layout(cp=2, tp=3, zero=1)), Setting(Layout(dp=2, tp=3, zero=3))],
    8: [Setting(Layout(dp=2, cp=2, tp=2, zero=3, replicas=2))],
}


def worst(found: Found, expected: Found) -> dict[str, float]:
    """Errors of each thing, over its largest element."""
    errors = {
        "loss": abs(found.loss / expected.loss - 1),
        "norm": abs(found.norm / expected.norm - 1),
    }
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        difference = np.abs(found.gradients[name] - gradient).max()
        errors[name] = float(difference / np.abs(gradient).max())
    return errors


def logits_error(parts: list[Found], expected: Found) -> float:
    """Every row of every micro-batch is on some rank, and each is right wherever it is."""
    error = 0.0
    for number, logits in expected.logits.items():
        rows = [each.logits[number] for each in parts if number in each.logits]
        known = np.stack([np.full(logits.shape, np.nan), *rows])
        assert (~np.isnan(known)).any(axis=0).all()
        if logits.size:
            error = max(error, float(np.nanmax(np.abs(known - logits))))
    return error


@pytest.mark.parametrize("ranks", SETTINGS)
def test_every_layout_equals_one_rank(ranks: int) -> None:
    expected = tensor_ranks.step_alone(ODD, BATCHES)
    results = run_ranks(ranks, tensor_ranks.step, ODD, BATCHES, SETTINGS[ranks])
    for number, setting in enumerate(SETTINGS[ranks]):
        parts = [each[number] for each in results]
        for found in parts:
            errors = worst(found, expected)
            assert max(errors.values()) <= 1e-10, (setting, max(errors, key=errors.__getitem__))
        assert logits_error(parts, expected) <= 1e-10, setting


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_tied_model_with_more_ranks_than_key_value_heads_equals_one_rank(ranks: int) -> None:
    settings = [Setting(Layout(tp=ranks, zero=zero)) for zero in (1, 3)]
    expected = tensor_ranks.step_alone(TIED, BATCHES)
    for results in run_ranks(ranks, tensor_ranks.step, TIED, BATCHES, settings):
        for found in results:
            assert max(worst(found, expected).values()) <= 1e-10


def test_a_rerun_is_bitwise_the_same() -> None:
    settings = [Setting(Layout(dp=2, tp=2, zero=1))] * 2
    one, two = run_ranks(4, tensor_ranks.step, ODD, BATCHES, settings)[3]
    again = run_ranks(4, tensor_ranks.step, ODD, BATCHES, settings[:1])[0][0]
    for other in (two, again):
        assert (one.loss, one.norm) == (other.loss, other.norm)
        for name, gradient in one.gradients.items():
            assert np.array_equal(gradient, other.gradients[name]), name


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_any_number_of_tokens_go_both_ways(ranks: int) -> None:
    for errors in run_ranks(ranks, tensor_ranks.rows_both_ways, 7)[ranks - 1]:
        assert max(errors) <= 1e-12


def test_heads_that_do_not_divide_are_refused() -> None:
    model = dataclasses.replace(ODD, heads=3, kv_heads=1)
    with pytest.raises(LayoutError) as refused:
        run_ranks(2, tensor_ranks.step, model, BATCHES, [Setting(Layout(tp=2))])
    assert str(refused.value) == (
        "3 heads do not divide over 2 tensor-parallel ranks. Set tp (layout.tp) to one of 1, "
        "3, or share tokens, which needs no division of heads: cp (layout.cp) = 2 "
        "with needed-kv."
    )


def test_zero_refuses_a_decoder_that_is_not_divided() -> None:
    with pytest.raises(LayoutError) as refused:
        run_ranks(2, tensor_ranks.shard_undivided, ODD, Layout(tp=2))
    assert str(refused.value) == (
        "The layout has tp = 2, and the decoder is whole. Divide it with "
        "parallel.apply.apply_axes, which applies ZeRO last."
    )
