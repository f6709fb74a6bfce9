"""Prices of a run's choices: those of the simulator, and what does not fit is tried last."""

import dataclasses

import numpy as np
import pytest

from equipoise.cost.step import StepOptions
from equipoise.plan.run_steps import RunSteps
from equipoise.plan.settings import list_choices
from equipoise.plan.settings_price import price_settings
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster import find_cluster
from equipoise.spec.load import read_run

LENGTHS = np.random.default_rng(0).integers(16, 3000, 600)
BASE = StepOptions(2048, 8, precision="fp32")
GIVEN = [("pack.context_tokens", "2048"), ("pack.step_tokens", "16384")]


@pytest.fixture
def machine() -> Machine:
    return Machine(find_cluster("this-cpu:2"))


def test_every_choice_has_a_price(machine: Machine) -> None:
    run = read_run(None, GIVEN)
    choices = list_choices(run, 2)
    runs = [read_run(None, [*GIVEN, *keys.items()]) for keys in choices.keys]
    prices = price_settings(runs, BASE, machine, LENGTHS)
    assert np.isfinite(prices).all() and prices.max() > 1.1 * prices.min()
    first = runs[0]
    layout = first.spec.layout.of_ranks(2)
    options = dataclasses.replace(BASE, recompute=first.spec.train.recompute)
    documents = RunSteps(first.spec, first.model, LENGTHS).documents("by-work", layout.dp)
    alone = price_step(first.model, machine, layout, options, documents=documents)
    assert prices[0] == pytest.approx(alone.step_s)


def test_what_no_price_knows_has_none(machine: Machine) -> None:
    runs = [read_run(None, [*GIVEN, ("pack.policy", "divided")]), read_run(None, GIVEN)]
    prices = price_settings(runs, BASE, machine, LENGTHS)
    assert np.isnan(prices[0]) and prices[1] > 0


def test_what_does_not_fit_is_tried_last(machine: Machine) -> None:
    run = read_run(None, GIVEN)
    whole = price_settings([run], BASE, machine, LENGTHS)
    spec = dataclasses.replace(machine.device, memory_bytes=400 << 20)
    node = dataclasses.replace(machine.cluster.classes[0], device=spec)
    small = Machine(dataclasses.replace(machine.cluster, classes=(node,)))
    assert price_settings([run], BASE, small, LENGTHS) == pytest.approx(10 * whole)
