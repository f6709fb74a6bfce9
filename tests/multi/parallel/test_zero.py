"""ZeRO's own exchanges, and the weights that ZeRO 3 keeps whole for a step."""

import dataclasses

import pytest
import torch

from equipoise.comm.local import run_ranks
from equipoise.cost.step.request import StepOptions
from equipoise.sim.parameters import moved_by_layer
from equipoise.spec.layout import Layout
from support.ranks.composed_ranks import DENSE, SPARSE
from support.ranks.zero_ranks import exchange, kept_layers, reduce_wrongly, step_of_three


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("length", [0, 1, 1000])
def test_an_exchange_gives_what_gloo_gives(world: int, length: int) -> None:
    for found in run_ranks(world, exchange, length):
        for what, (one, again, expected) in found.items():
            assert torch.equal(one, again), what
            torch.testing.assert_close(one, expected, msg=what, rtol=1e-6, atol=1e-6)


def test_a_mean_is_refused() -> None:
    said = "Gradients are summed, and RedOpType.AVG was asked for: force a sum."
    assert run_ranks(1, reduce_wrongly) == [said]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_small_groups_meet_once_a_step(precision: str) -> None:
    """Of groups that are all moved, of layers kept and tables moved, and of none moved."""
    model = DENSE
    width = 4 if precision == "fp32" else 2
    layer = model.count_layer(sparse=False, active=False) + 2 * model.hidden
    tables = 2 * model.hidden * model.vocab
    layers, last = model.layers * layer, model.layers + 1
    kept = {
        0: (0, [3 * model.layers + 1] * 3),
        layer * width: (layers, [last + 1, 2, last + 1]),
        1 << 20: (layers + tables + model.hidden, [last, 0, last]),
    }
    assert layer < tables + model.hidden
    grads = []
    for small_bytes, (params, calls) in kept.items():
        for held, called, found in run_ranks(2, step_of_three, model, precision, small_bytes):
            assert called == calls, small_bytes
            weights, gradients, _ = zip(*held, strict=True)
            assert weights[2] == gradients[2] == 0
            assert weights[0] == weights[1]
            # One word more, where 61 of them do not divide.
            padding = 2 * model.hidden * width
            assert params * width <= weights[0] <= params * width + padding, small_bytes
            grads.append(found)
    error = 1e-6 if precision == "fp32" else 2e-2
    for found in grads[1:]:
        for name, each in grads[0].items():
            assert (found[name] - each).abs().max() <= error * each.abs().max(), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_price_keeps_the_layers_that_ranks_keep(precision: str) -> None:
    """Of 0.4 MB and less in fp32, of 1.6 MB, of 0.8 MB in bf16; with experts in some layers."""
    wide = dataclasses.replace(DENSE, ffn=8192, layers=2)
    kept = set()
    for model in (DENSE, SPARSE, wide, dataclasses.replace(SPARSE, expert_ffn=1600)):
        options = StepOptions(64, 2, precision=precision)
        layout = Layout(dp=2, zero=3)
        moved = [
            moved_by_layer(model, layout, options, sparse=model.is_sparse(layer))
            for layer in range(model.layers)
        ]
        priced = [each.in_passes.shared == 0 for each in moved]
        assert run_ranks(2, kept_layers, model, precision) == [priced, priced]
        kept |= set(priced)
    assert kept == ({True, False} if precision == "fp32" else {True})
