"""The best choices for a run: ordered, under their faster policy, with this package's memory."""

import dataclasses
import math

import numpy as np
import pytest

from equipoise.cost.memory.forecast import forecast_memory
from equipoise.cost.step.request import StepOptions
from equipoise.plan.answer.final import Finalist
from equipoise.plan.answer.run_price import find_window_wall, forecast_ranks, packer_of, price_run
from equipoise.plan.answer.run_steps import COMPARED, RunSteps
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.trainable import list_trainable
from equipoise.sim.machine import Machine
from equipoise.sim.step import run_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.run.load import read_run

RUN = read_run(None, [("pack.context_tokens", "2048"), ("pack.step_tokens", "8192")])
LENGTHS = np.random.default_rng(0).lognormal(6.0, 1.5, size=200).astype(np.int64) + 1
MACHINE = Machine(find_cluster("h100-sxm:2"))
BASE = StepOptions(2048, 4)
"""Of a device of the tables, so that no test reads this machine."""


@pytest.fixture(scope="module")
def steps() -> RunSteps:
    return RunSteps(RUN.spec, RUN.model, LENGTHS)


@pytest.fixture(scope="module")
def finalists(steps: RunSteps) -> list[Finalist]:
    space = list_trainable(
        RUN, 2, BASE, count_batches=lambda dp: steps.count_batches("by-work", dp)
    )
    search = Search(RUN.model, MACHINE, space, packer_of(steps, "by-work"), gap=-math.inf)
    found = search.run()
    assert found.progress.priced > 20
    return price_run(search, found, steps, policies=COMPARED, precision="fp32")


def test_the_first_is_the_fastest_and_none_is_there_twice(finalists: list[Finalist]) -> None:
    seconds = [each.run.price.step_s for each in finalists]
    assert len(seconds) == 4 and seconds == sorted(seconds)
    bare = [
        (each.choice.layout, dataclasses.replace(each.choice.options, policy="any"))
        for each in finalists
    ]
    assert all(bare.count(each) == 1 for each in bare)
    assert {each.choice.options.policy for each in finalists} <= set(COMPARED)


def test_every_finalist_has_the_faster_policy(steps: RunSteps, finalists: list[Finalist]) -> None:
    for each in finalists:
        for policy in COMPARED:
            documents = steps.documents(policy, each.choice.layout)
            options = dataclasses.replace(each.choice.options, policy=policy)
            other = run_step(RUN.model, MACHINE, each.choice.layout, options, documents=documents)
            assert each.run.price.step_s <= other.price.step_s * (1 + 1e-9)


def test_memory_is_the_forecast_of_the_runs_own_ranks(
    steps: RunSteps, finalists: list[Finalist]
) -> None:
    for each in finalists:
        layout, options, price = each.choice.layout, each.choice.options, each.run.price
        assert sum(price.memory.values()) == price.memory_bytes.max()
        if layout.pp > 1 or layout.cp > 1:
            continue
        batches = steps.documents(options.policy, layout)
        sizes = [sum(batch) for row in batches for batch in row]
        forecast = forecast_memory(
            RUN.model,
            layout,
            tokens=steps.most_tokens(options.policy, layout),
            precision="fp32",
            recompute=options.recompute,
            micro_batches=max(map(len, batches)),
            sizes=len(set(sizes)),
        )
        assert price.memory_bytes.max() == forecast.total_bytes


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(dp=2), {}),
        (Layout(cp=2), {"recompute": "full"}),
        (Layout(pp=2), {"schedule": "1f1b"}),
        (Layout(pp=2), {"schedule": "zb-v", "virtual": 2}),
    ],
)
def test_a_forecast_grows_with_the_largest_micro_batch(layout: Layout, options: dict) -> None:
    choice = Choice(layout, dataclasses.replace(BASE, **options))
    run = run_step(RUN.model, MACHINE, layout, choice.options)
    small, large = (
        forecast_ranks(RUN.model, choice, run, tokens, "fp32") for tokens in (2048, 4096)
    )
    assert len(small) == len(large) == layout.pp
    assert all(one.total_bytes < other.total_bytes for one, other in zip(small, large, strict=True))
    layers = len(run.layers) // layout.pp
    assert layers == choice.options.virtual


def test_the_window_before_a_wall_fits(finalists: list[Finalist]) -> None:
    best = finalists[0]
    assert find_window_wall(RUN.model, best, 2048, "fp32") == ()
    run = best.run
    price = dataclasses.replace(run.price, capacity_bytes=int(run.price.memory_bytes.max() * 1.6))
    tight = dataclasses.replace(best, run=dataclasses.replace(run, price=price))
    (wall,) = find_window_wall(RUN.model, tight, 2048, "fp32")
    assert wall.grows == "window" and wall.before == 2048 < wall.after
    assert wall.memory_gib > wall.capacity_gib
    sizes = [2048 * factor for factor in (1, 1.25, 1.5, 2, 3, 4, 8, 16)]
    before = max(size for size in sizes if size < wall.after)
    fits = forecast_ranks(RUN.model, best.choice, run, int(before), "fp32")
    assert max(each.total_bytes for each in fits) <= price.capacity_bytes
