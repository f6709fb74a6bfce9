"""A plan's encoders: tokens lie where the run has them, and every choice is longer by them."""

import dataclasses

import numpy as np
import pytest

from equipoise.cost.step.request import StepOptions
from equipoise.plan.answer.final import Finalist
from equipoise.plan.answer.run_encoders import RunEncoders
from equipoise.plan.answer.run_price import find_window_wall, with_memory
from equipoise.plan.answer.run_steps import RunSteps
from equipoise.plan.space.choice import Choice
from equipoise.sim.machine import Machine
from equipoise.sim.rank_loads import ContextPlanner
from equipoise.sim.step import run_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.modality.sections import AudioSpec, VisionSpec
from equipoise.spec.run.load import read_run
from equipoise.spec.run.spec import LayoutSpec
from support.items import make_items

RUN = read_run(None, [("pack.context_tokens", "256"), ("pack.step_tokens", "1024")])
MACHINE = Machine(find_cluster("h100-sxm:2"))
LENGTHS = np.array([200, 30, 256, 90, 140, 7, 256, 64] * 4, dtype=np.int64)
ITEMS = make_items(
    [[(1, n // 2, 0)] if n > 100 else [(0, 5, 1)] * (n == 30) for n in LENGTHS.tolist()]
)
BASE = StepOptions(256, 4, precision="fp32")


@pytest.fixture(scope="module")
def encoders() -> RunEncoders:
    steps = RunSteps(RUN.spec, RUN.model, LENGTHS)
    specs = VisionSpec(layers=1).encoder, AudioSpec(layers=1).encoder
    return RunEncoders(specs, ITEMS, len(LENGTHS), RUN.model, MACHINE, steps)


@pytest.mark.parametrize(
    ("layout", "options", "embeds"),
    [
        (Layout(dp=2), {}, (0, 1)),
        (Layout(cp=2), {}, (0, 1)),
        (Layout(tp=2), {}, (0, 1)),
        (Layout(pp=2), {}, (0,)),
        (Layout(pp=2), {"schedule": "zb-v", "virtual": 2}, (0,)),
    ],
)
def test_every_choice_is_longer_by_its_encoders(
    encoders: RunEncoders, layout: Layout, options: dict, embeds: tuple[int, ...]
) -> None:
    choice = Choice(layout, dataclasses.replace(BASE, **options))
    step = encoders.plan(choice)
    assert set(np.flatnonzero(step.plan.sent.sum(axis=0)).tolist()) == set(embeds)
    assert int(step.plan.sent.sum()) == _stand_ins(encoders, layout)
    documents = encoders.steps.documents("by-work", layout)
    run = run_step(RUN.model, MACHINE, layout, choice.options, documents=documents)
    alone = with_memory(RUN.model, Finalist(choice, run), 512, "fp32")
    both, price = encoders.added_to(alone), encoders.price(choice)
    assert both.run.price.step_s == pytest.approx(alone.run.price.step_s + price.step_s)
    assert sum(both.run.price.memory.values()) == pytest.approx(both.run.price.memory_bytes.max())
    assert price.least_s == pytest.approx(encoders.price(Choice(Layout(dp=2), BASE)).least_s)


def test_encoders_follow_the_stage_over_all_ranks(encoders: RunEncoders) -> None:
    prices = [encoders.price(Choice(Layout(tp=2, zero=zero), BASE)) for zero in (0, 1, 2)]
    held = [int(each.held_bytes.max()) for each in prices]
    assert held[0] > held[1] > held[2]  # though the decoder has nobody to shard with
    assert prices[0].update_s == pytest.approx(2 * prices[1].update_s)
    assert prices[0].encode_s.tolist() == prices[2].encode_s.tolist()


def _stand_ins(encoders: RunEncoders, layout: Layout) -> int:
    """Tokens of the step that stand in for rows."""
    stands = 0
    for batch in encoders.steps.packed("by-work", layout):
        for document, start, stop in batch.pieces.tolist():
            for item in ITEMS.within(document % len(LENGTHS), start, stop).tolist():
                begin = int(ITEMS.begin[item])
                stands += min(begin + int(ITEMS.rows[item]), stop) - max(begin, start)
    return stands


@pytest.mark.parametrize("sharding", ["mixed", "head-tail-document", "contiguous"])
def test_context_ranks_have_the_tokens_that_they_will_have(
    encoders: RunEncoders, sharding: str
) -> None:
    options = dataclasses.replace(BASE, sharding=sharding)
    planner = ContextPlanner(RUN.model, LayoutSpec(dp=1, cp=2, sharding=sharding))
    lengths = [200, 30, 26]
    shares = encoders._shares(Choice(Layout(cp=2), options), lengths)
    own = planner.plan(lengths).shares.rows
    assert [each.tolist() for each in shares] == [each.tolist() for each in own]


def test_a_wall_counts_what_encoders_hold(encoders: RunEncoders) -> None:
    choice = Choice(Layout(dp=2), BASE)
    documents = encoders.steps.documents("by-work", choice.layout)
    run = run_step(RUN.model, MACHINE, choice.layout, BASE, documents=documents)
    alone = with_memory(RUN.model, Finalist(choice, run), 512, "fp32")
    both = encoders.added_to(alone)
    held = both.run.price.memory["encoders"]
    walls = []
    for each in (alone, both):
        most = int(alone.run.price.memory_bytes.max() * 1.5 + held)
        price = dataclasses.replace(each.run.price, capacity_bytes=most)
        tight = dataclasses.replace(each, run=dataclasses.replace(each.run, price=price))
        (wall,) = find_window_wall(RUN.model, tight, 512, "fp32")
        walls.append(wall)
    assert walls[1].after <= walls[0].after
    assert walls[1].memory_gib * 2**30 > most
