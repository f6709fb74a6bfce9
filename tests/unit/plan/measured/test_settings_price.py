"""Prices of a run's choices: those of the simulator, and what does not fit is tried last."""

import dataclasses

import numpy as np
import pytest

from equipoise.cost.step.request import StepOptions
from equipoise.plan.answer.run_steps import RunSteps
from equipoise.plan.measured.settings import Choices, list_choices, price_choices, prior_of
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.run.load import read_run
from equipoise.spec.run.resolve import ResolvedRun

LENGTHS = np.random.default_rng(0).integers(16, 3000, 600)
BASE = StepOptions(2048, 8, precision="fp32")
GIVEN = [("pack.context_tokens", "2048"), ("pack.step_tokens", "16384")]


CLUSTER = find_cluster("this-cpu:2")


def steps_of(run: ResolvedRun) -> RunSteps:
    return RunSteps(run.spec, run.model, LENGTHS)


def choices_of(run: ResolvedRun) -> Choices:
    return list_choices(run, 2, BASE, count_batches=lambda dp: 4)


def test_every_choice_has_a_price() -> None:
    run = read_run(None, GIVEN)
    choices, steps = choices_of(run), steps_of(run)
    prices = prior_of(price_choices(run, choices.laid, CLUSTER, steps))
    assert np.isfinite(prices).all() and prices.max() > 1.1 * prices.min()
    layout, options = choices.laid[0].layout, choices.laid[0].options
    documents = steps.documents("by-work", layout)
    alone = price_step(run.model, Machine(CLUSTER), layout, options, documents=documents)
    assert prices[0] == pytest.approx(alone.step_s)


def test_what_no_price_knows_has_none() -> None:
    run = read_run(None, [*GIVEN, ("pack.policy", "divided")])
    choices = choices_of(run)
    priced = price_choices(run, choices.laid, CLUSTER, steps_of(run))
    assert priced == [None] * len(choices.laid) and np.isnan(prior_of(priced)).all()


def test_what_does_not_fit_is_tried_last() -> None:
    run = read_run(None, GIVEN)
    one, steps = choices_of(run).laid[:1], steps_of(run)
    (whole,) = price_choices(run, one, CLUSTER, steps)
    assert whole is not None and whole.run.price.fits
    device = dataclasses.replace(CLUSTER.classes[0].device, memory_bytes=400 << 20)
    node = dataclasses.replace(CLUSTER.classes[0], device=device)
    small = dataclasses.replace(CLUSTER, classes=(node,))
    tight = prior_of(price_choices(run, one, small, steps))
    assert tight[0] == pytest.approx(10 * whole.run.price.step_s)
