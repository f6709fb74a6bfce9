"""What is recomputed has the same bits: loss and every gradient, on every layout."""

import dataclasses
from typing import get_args

import numpy as np
import pytest
import torch

from equipoise.comm.local import run_ranks
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.recompute import LayerRecompute, layer_recompute
from equipoise.spec.run.spec import Recompute
from support.ranks import expert_ranks, tensor_ranks
from support.ranks.tensor_ranks import Setting

DENSE = ModelSpec(
    layers=4, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=61, head_width=4, qk_norm=True
)
SPARSE = dataclasses.replace(DENSE, experts=5, top_k=2, expert_ffn=8, balance="bias")
BATCHES = [[13, 5, 1], [11, 0, 2], [1], []]
KINDS: tuple[Recompute, ...] = ("none", "attention", "selective", "every-2")
LAYOUTS = {
    2: [
        *(Layout(dp=2, zero=zero) for zero in (0, 1, 2, 3)),
        Layout(cp=2, zero=1),
        Layout(cp=2, zero=3),
        Layout(tp=2, zero=1),
        Layout(tp=2, zero=3),
    ],
    4: [Layout(dp=2, cp=2, zero=2), Layout(cp=2, tp=2, zero=3)],
}


def kinds_of(turn: int, zero: int) -> tuple[Recompute, ...]:
    """None and one other, in turn; all where ZeRO 3 gathers weights once more."""
    return KINDS if zero == 3 else (KINDS[0], KINDS[1 + turn % 3])


def test_layers_do_everything_that_a_layer_can() -> None:
    found = {layer_recompute(kind, layer) for kind in KINDS for layer in range(DENSE.layers)}
    assert found == set(get_args(LayerRecompute))


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_layout_has_the_same_bits(ranks: int) -> None:
    settings = [
        Setting(layout, kind)
        for turn, layout in enumerate(LAYOUTS[ranks])
        for kind in kinds_of(turn, layout.zero)
    ]
    for found in run_ranks(ranks, tensor_ranks.step, DENSE, BATCHES, settings):
        for setting, again in zip(settings, found, strict=True):
            if setting.recompute == "none":
                kept = again
            assert (again.loss, again.norm) == (kept.loss, kept.norm), setting
            for name, gradient in kept.gradients.items():
                assert np.array_equal(again.gradients[name], gradient), (setting, name)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_experts_on_two_ranks_have_the_same_bits_and_are_counted_once(zero: int) -> None:
    packs = (((9, 1), (5,)), ((14,), ()))
    layout = Layout(dp=2, ep=2, zero=zero)
    cases = [
        expert_ranks.Case(SPARSE, layout, packs, states=(3, -2, 0, 5, -6), recompute=kind)
        for kind in kinds_of(zero, zero)
    ]
    for outcomes in run_ranks(2, expert_ranks.compare, cases):
        for each in outcomes:
            assert max(each.loss_error, each.norm_error, *each.errors.values()) <= 1e-10
            assert each.loads == outcomes[0].loads
            for name, gradient in outcomes[0].gradients.items():
                assert torch.equal(each.gradients[name], gradient), name
