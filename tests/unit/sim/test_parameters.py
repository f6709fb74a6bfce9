"""When parameters travel, and how wide: what ZeRO 3 keeps, and what a precision sends."""

import dataclasses
from typing import Any

import pytest

from equipoise.cost.step.request import TERMS
from equipoise.plan.bounds.group import least_travel_s
from equipoise.plan.space.choice import Choice
from equipoise.sim.machine import Machine
from equipoise.sim.mixed.layers import LayerStrategy
from equipoise.sim.mixed.replay import run_layered
from equipoise.sim.parameters import Held, gather_s, held_by_layer, moved_by_layer, travel_of
from equipoise.sim.parts import StepParts
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec, preset
from support.machines import MODEL, SPARSE, h100, options

SMALL = preset("2m")
NOTHING = Held(0.0, 0.0)
PASSES = TERMS.index("parameter traffic")


def waits_s(model: ModelSpec, layout: Layout, **changes: Any) -> float:
    """What a layer waits for its parameters in the passes of a micro-batch."""
    parts = StepParts(model, h100(layout.dp), layout, options(**changes)).price([4096.0])
    return float(parts.layers[0][:, PASSES].sum())


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_below_zero_3_all_travels_once(zero: Any) -> None:
    layout = Layout(dp=8, ep=4, zero=zero)
    found = moved_by_layer(SPARSE, layout, options(), sparse=True)
    assert found.once == held_by_layer(SPARSE, layout, sparse=True)
    assert found.in_passes == NOTHING


def test_zero_3_keeps_small_layers_and_no_other() -> None:
    layout = Layout(dp=8, zero=3)
    small = moved_by_layer(SMALL, layout, options(), sparse=False)
    assert small.once == held_by_layer(SMALL, layout, sparse=False) and small.in_passes == NOTHING
    large = moved_by_layer(MODEL, layout, options(), sparse=False)
    assert large.in_passes == held_by_layer(MODEL, layout, sparse=False) and large.once == NOTHING
    assert waits_s(SMALL, layout) == 0 and waits_s(MODEL, layout) > 0
    # Wider weights, or a pipeline, whose other micro-batches come between.
    assert SMALL.count_layer(sparse=False, active=False) * 2 < 1 << 20
    wide = dataclasses.replace(SMALL, ffn=2 * SMALL.ffn)
    assert waits_s(wide, layout) == 0 and waits_s(wide, layout, precision="fp32") > 0
    staged = moved_by_layer(SMALL, Layout(dp=4, pp=2, zero=3), options(), sparse=False)
    assert staged.once == NOTHING


def test_experts_that_ranks_share_travel_in_every_pass() -> None:
    model = dataclasses.replace(SMALL, experts=4, top_k=2, expert_ffn=64)
    alone = moved_by_layer(model, Layout(dp=8, zero=3), options(), sparse=True)
    assert alone.in_passes == NOTHING and alone.once.experts > 0
    spread = moved_by_layer(model, Layout(dp=8, ep=2, zero=3), options(), sparse=True)
    assert spread.once.experts == spread.in_passes.shared == 0
    assert spread.once.shared == alone.once.shared
    assert spread.in_passes.experts == alone.once.experts / 2


def test_what_is_kept_costs_what_zero_1_costs() -> None:
    machine, every = h100(8), [range(SMALL.layers)]
    travel = [travel_of(SMALL, machine, Layout(dp=8, zero=z), options(), every) for z in (1, 3)]
    for name in ("gather_s", "reduce_s", "optimizer_s"):
        assert getattr(travel[0], name) == getattr(travel[1], name)
    one, three = (price_step(SMALL, machine, Layout(dp=8, zero=z), options()) for z in (1, 3))
    assert one.terms["data traffic"] == pytest.approx(three.terms["data traffic"])
    assert "parameter traffic" not in three.terms


def test_parameters_travel_as_wide_as_they_are_computed_with() -> None:
    machine, layout = Machine(find_cluster("h100-sxm:8")), Layout(dp=8)
    held = held_by_layer(MODEL, layout, sparse=False)
    ends = Held(2.0 * MODEL.hidden * MODEL.vocab, 0.0)
    for precision, width in (("bf16", 2), ("fp8", 2), ("fp32", 4)):
        asked = options(precision=precision, step_sequences=8)
        slow = asked.residuals.traffic
        whole = gather_s(machine, layout, held * MODEL.layers + ends, width) * slow
        every = [range(MODEL.layers)]
        assert travel_of(MODEL, machine, layout, asked, every).gather_s[0] == pytest.approx(whole)
        least = least_travel_s(MODEL, machine, Choice(layout, asked), MODEL.layers)
        assert least[0] == pytest.approx(gather_s(machine, layout, held * 8, width) * slow)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("zero", [1, 3])
def test_layers_of_their_own_that_are_alike_cost_what_a_step_costs(
    precision: Any, zero: Any
) -> None:
    layout, machine = Layout(dp=8, zero=zero), h100(8)
    asked = options(precision=precision)
    layers = [LayerStrategy(layout, "none", asked.context_strategy)] * SMALL.layers
    own = run_layered(SMALL, machine, layout, asked, layers).price.step_s
    assert own == pytest.approx(price_step(SMALL, machine, layout, asked).step_s)
