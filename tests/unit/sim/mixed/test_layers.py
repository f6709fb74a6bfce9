"""Layers with strategies of their own: alike they price as one, apart they pay for what moves."""

import dataclasses
from typing import Any, Literal

import numpy as np
import pytest

from equipoise.base.errors import LayoutError
from equipoise.cost.step.request import StepOptions
from equipoise.sim.mixed.layers import LayerStrategy, redistribute_s
from equipoise.sim.mixed.replay import run_layered
from equipoise.sim.moments import bytes_over_time
from equipoise.sim.step import run_step
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from support.machines import MODEL, SPARSE, h100, options, stack

PP_DP = ("pp", "dp", "cp", "tp")


def own(layout: Layout, asked: StepOptions, **changes: Any) -> LayerStrategy:
    recompute = changes.pop("recompute", asked.recompute)
    return LayerStrategy(dataclasses.replace(layout, **changes), recompute)


@pytest.mark.parametrize(
    ("model", "layout", "changes"),
    [
        (MODEL, Layout(dp=8, zero=1), {}),
        (MODEL, Layout(dp=4, tp=2, zero=0), {"recompute": "selective"}),
        (MODEL, Layout(dp=8, zero=3, replicas=2), {}),
        (MODEL, Layout(dp=2, cp=2, pp=2, zero=1), {"recompute": "full"}),
        (MODEL, Layout(dp=2, pp=4, zero=2), {"schedule": "zb-h1"}),
        (MODEL, Layout(pp=4, tp=2), {"schedule": "interleaved", "virtual": 2}),
        (MODEL, Layout(dp=4, pp=2, zero=2), {"stack": stack(stage_overlap=True)}),
        (MODEL, Layout(dp=2, pp=4), {"schedule": "zb-v", "virtual": 2}),
        (dataclasses.replace(MODEL, tied=True), Layout(dp=4, pp=2, zero=3), {}),
        (SPARSE, Layout(dp=8, ep=4, zero=1), {"expert_skew": 1.5}),
        (SPARSE, Layout(dp=4, tp=2, ep=2, etp=2, zero=3), {}),
    ],
    ids=str,
)
def test_layers_that_are_alike_price_as_one_step(
    model: ModelSpec, layout: Layout, changes: dict[str, Any]
) -> None:
    asked, machine = options(**changes), h100(8)
    one = run_step(model, machine, layout, asked)
    own_layers = run_layered(model, machine, layout, asked, [own(layout, asked)] * model.layers)
    whole, found = one.price, own_layers.price
    over_time = [bytes_over_time(run.slowest, run.memory) for run in (one, own_layers)]
    for expected, curve in zip(*over_time, strict=True):
        assert curve.held == pytest.approx(expected.held, rel=1e-6)
    assert found.step_s == pytest.approx(whole.step_s, rel=1e-9)
    assert found.terms == pytest.approx(whole.terms)
    assert found.memory_bytes == pytest.approx(whole.memory_bytes, rel=1e-6)
    assert found.memory == pytest.approx(whole.memory, rel=1e-6)
    assert found.tokens == whole.tokens


@pytest.mark.parametrize(
    ("zero", "first"),
    [(1, [[4096], [1000, 3096]]), (3, [[4050], [4050]])],  # more work, and fewer tokens
)
def test_documents_price_as_in_one_step(zero: Literal[1, 3], first: list[list[int]]) -> None:
    layout, asked, machine = Layout(dp=2, tp=2, pp=2, zero=zero), options(), h100(8)
    rows = [first * 4, [[2048, 2048]] * 8]
    whole = run_step(MODEL, machine, layout, asked, documents=rows).price
    layers = [own(layout, asked)] * MODEL.layers
    found = run_layered(MODEL, machine, layout, asked, layers, documents=rows).price
    assert found.step_s == pytest.approx(whole.step_s)
    assert found.memory_bytes == pytest.approx(whole.memory_bytes, rel=1e-6)
    assert found.useful_flop == whole.useful_flop


def test_a_layer_that_recomputes_takes_longer_and_holds_less() -> None:
    layout, asked, machine = Layout(dp=8), options(), h100(8)
    prices = []
    for count in range(0, 9, 4):
        layers = [own(layout, asked, recompute="full")] * count
        layers += [own(layout, asked)] * (8 - count)
        prices.append(run_layered(MODEL, machine, layout, asked, layers).price)
    steps = [each.step_s for each in prices]
    held = [each.memory["activations"] for each in prices]
    assert steps[1] - steps[0] == pytest.approx(steps[2] - steps[1])
    assert held[0] - held[1] == pytest.approx(held[1] - held[2])
    assert steps[0] < steps[1] and held[1] < held[0]
    assert "redistribution" not in prices[1].terms


def test_between_degrees_of_context_activations_move() -> None:
    layout, machine = Layout(dp=4, tp=2), h100(8)
    asked = options(micro_batch=1, step_sequences=16)
    turned = own(layout, asked, tp=4, dp=2)
    shared = own(layout, asked, tp=1, cp=2)
    plain = own(layout, asked)
    alike = run_layered(MODEL, machine, layout, asked, [plain] * 4 + [turned] * 4).price
    assert "redistribution" not in alike.terms  # the same tokens on the same ranks
    once = run_layered(MODEL, machine, layout, asked, [plain] * 7 + [shared]).price
    often = run_layered(MODEL, machine, layout, asked, [plain, shared] * 4).price
    assert often.terms["redistribution"] == pytest.approx(4 * once.terms["redistribution"])
    moved = redistribute_s(machine, layout, shared.layout, 2048, MODEL.hidden)
    micro_batches = asked.count_micro_batches(layout)
    wanted = 2 * 2 * micro_batches * moved * asked.residuals.traffic  # there and back, twice
    assert once.terms["redistribution"] == pytest.approx(wanted)
    assert np.all(once.exposed_s > 0)


LAYOUT = Layout(dp=2, tp=2, pp=2)
ASKED = options()


@pytest.mark.parametrize(
    ("strategy", "changes", "documents", "message"),
    [
        (
            LayerStrategy(dataclasses.replace(LAYOUT, tp=4)),
            {},
            None,
            "A layer of tp=4,cp=1,dp=2 on 8 ranks cannot follow one of tp=2,cp=1,dp=2 on 4: layers "
            "share the ranks of their stage, experts and order. Give degrees whose product is 4.",
        ),
        (
            LayerStrategy(dataclasses.replace(LAYOUT, tp=1, dp=4)),
            {},
            None,
            "A layer of tp=1,cp=1,dp=4 has dp=4 beside dp=2, and where dp is the outermost axis "
            "another dp is another stage's ranks. Plan with --order pp-dp.",
        ),
        (
            LayerStrategy(dataclasses.replace(LAYOUT, tp=4, dp=1, order=PP_DP)),
            {},
            [[[4096]] * 8],
            "A layer of tp=4,cp=1,dp=1 has dp=1 beside dp=2, and documents are packed for dp=2. "
            "Give every layer that dp.",
        ),
        (
            LayerStrategy(dataclasses.replace(LAYOUT, tp=1, dp=4, order=PP_DP)),
            {},
            None,
            "A layer of tp=1,cp=1,dp=4 cannot divide the 2 sequences of a micro-batch over 4 "
            "data-parallel ranks. Give a dp that divides them.",
        ),
        (
            LayerStrategy(LAYOUT),
            {"stack": stack(sequence_parallel=False)},
            None,
            "A layer of tp=2,cp=1,dp=2 is priced with sequence parallelism alone, and the stack "
            "has none. Give a stack with sequence_parallel.",
        ),
    ],
)
def test_layers_that_do_not_go_together(
    strategy: LayerStrategy, changes: dict[str, Any], documents: Any, message: str
) -> None:
    layout = dataclasses.replace(LAYOUT, order=strategy.layout.order)
    asked = dataclasses.replace(ASKED, **changes)
    with pytest.raises(LayoutError) as caught:
        run_layered(MODEL, h100(8), layout, asked, [strategy] * 8, documents=documents)
    assert str(caught.value) == message


def test_every_layer_has_a_strategy() -> None:
    with pytest.raises(LayoutError) as caught:
        run_layered(MODEL, h100(8), LAYOUT, ASKED, [LayerStrategy(LAYOUT)] * 7)
    assert str(caught.value) == "7 strategies for a model of 8 layers. Give each layer one."
