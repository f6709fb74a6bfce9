"""Passes without those of frozen weights: nothing frozen changes nothing, more is never slower."""

import dataclasses

import numpy as np
import pytest

from equipoise.cost.step.request import TERMS, StepOptions
from equipoise.cost.step.trained import cut_ends, cut_layers
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import preset
from equipoise.spec.model.weights import trained_shares

MODEL, MACHINE = preset("7m"), Machine(find_cluster("h100-sxm:4"))
OPTIONS = StepOptions(2048, 8)


def _options(*patterns: str, reads_back: bool = False) -> StepOptions:
    trained = trained_shares(MODEL, patterns, reads_back=reads_back)
    return dataclasses.replace(OPTIONS, trained=trained)


def _parts() -> np.ndarray:
    return np.random.default_rng(0).random((3, len(TERMS)))


def test_nothing_frozen_changes_nothing() -> None:
    layer, end = _parts(), _parts()
    assert cut_layers((layer,) * MODEL.layers, OPTIONS) == (layer,) * MODEL.layers
    assert cut_ends(end, end, OPTIONS) == (end, end)


def test_a_frozen_layer_has_gradients_of_its_input_alone_and_the_first_ones_none() -> None:
    layer = _parts()
    options = _options("embed", "layers.0-1", "layers.3")
    assert options.trained is not None and options.trained.first_back == 2
    below, _, whole, frozen, *_ = cut_layers((layer,) * MODEL.layers, options)
    assert (below[0] == layer[0]).all() and not below[1:].any()
    assert (whole == layer).all()
    assert not frozen[2].any() and (frozen[:2] <= layer[:2]).all()
    parameters = TERMS.index("parameter traffic")
    others = np.arange(len(TERMS)) != parameters
    assert (frozen[1, others] == layer[1, others]).all()
    assert 0 < frozen[1, parameters] < layer[1, parameters]  # it is still gathered
    first, last = cut_ends(layer, layer, options)
    assert not first[2].any() and (last == layer).all()
    alike = cut_layers((layer,) * MODEL.layers, options)
    assert len({id(each) for each in alike}) == 3


@pytest.mark.parametrize("layout", [Layout(dp=4), Layout(dp=2, pp=2), Layout(dp=4, zero=3)])
def test_more_that_is_frozen_is_never_slower_and_never_larger(layout: Layout) -> None:
    every = ("embed", "layers", "norm", "head")
    settings = [
        _options("embed", reads_back=True),
        _options("embed", "layers.0-2", reads_back=True),
        _options("embed", "layers.0-2"),
        _options(*every, reads_back=True),
    ]
    prices = [price_step(MODEL, MACHINE, layout, each) for each in (OPTIONS, *settings)]
    seconds = [each.step_s for each in prices]
    assert seconds[:4] == sorted(seconds[:4], reverse=True)
    assert seconds[4] < seconds[1]
    assert prices[4].terms.get("optimizer", 0.0) == 0.0
    for each in prices:
        assert sum(each.terms.values()) == pytest.approx(each.step_s)
    assert prices[4].memory["optimizer"] == 0.0 < prices[0].memory["optimizer"]
