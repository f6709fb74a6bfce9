"""Choices that offload: never faster, bounded from below, and found where nothing else fits."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError, SpecError
from equipoise.cost.step.request import Stack, StepOptions
from equipoise.plan.bounds.group import group_bound_s
from equipoise.plan.bounds.kernels import Kernels, own_passes
from equipoise.plan.bounds.pipeline import pipeline_bound_s
from equipoise.plan.bounds.roofline import host_bound_bytes, needed_bytes, peak_bound_s
from equipoise.plan.search.incumbent import Outcome
from equipoise.plan.search.offload import search_offloaded
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import Space
from equipoise.plan.space.listing import list_space
from equipoise.plan.space.packs import sort_batches
from equipoise.sim.machine import Machine
from equipoise.sim.parts import StepParts
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import ClusterSpec, find_cluster
from equipoise.spec.offload import OFFLOADS
from equipoise.spec.words import read_model
from support.bounded_spaces import MODELS, draws, setting
from support.drawn_batches import batches_of

STACKS = {
    "ours": Stack(),
    "theirs": Stack(attention="unfused", split="equal", dropout=True, offloads_master=False),
}


@settings(deadline=None, max_examples=25)
@given(*draws(STACKS), st.sampled_from(OFFLOADS[1:]))
def test_no_choice_is_faster_with_offloading_and_no_bound_exceeds_it(
    name, devices, stack, micro, at, seed, offload
) -> None:
    model = MODELS[name]
    machine, space = setting(name, devices, STACKS[stack], micro)
    row = at % len(space)
    plain = space.choice(row)
    choice = space.choice(OFFLOADS.index(offload) * len(space) + row)
    assert choice == Choice(plain.layout, dataclasses.replace(plain.options, offload=offload))
    layout, options = choice.layout, choice.options
    batches = batches_of(choice, seed)
    own = StepParts(model, machine, layout, options)
    try:
        price = price_step(model, machine, layout, options, documents=[batches], parts=own)
        without = price_step(model, machine, layout, plain.options, documents=[batches])
    except (LayoutError, SpecError):
        return
    assert price.step_s >= without.step_s * (1 - 1e-9)
    if layout.pp == 1 or offload == "optimizer":  # else layers are split otherwise
        assert price.memory_bytes.max() <= without.memory_bytes.max()
    assert sum(price.terms.values()) == pytest.approx(price.step_s, rel=1e-6)
    assert min(price.terms.values()) >= -1e-6  # replays are of whole nanoseconds

    columns = {key: values[[row]] for key, values in space.columns.items()}
    one = Space(columns | {"offload": np.array([OFFLOADS.index(offload)])}, space.base)
    if seed is None:
        assert needed_bytes(model, machine, one)[0] <= price.memory_bytes.max() * (1 + 1e-9)
    assert host_bound_bytes(model, one)[0] <= price.host_bytes.max() * (1 + 1e-9)
    assert peak_bound_s(model, machine, one, has_documents=seed is not None)[0] <= price.step_s
    shared, bins = Kernels(model, machine), sort_batches(batches, 64)
    kernels = shared.group_passes(choice, bins)
    together = group_bound_s(
        *(model, machine, one, np.array([0]), kernels, {}), has_documents=seed is not None
    )
    assert together[0] <= price.step_s
    passes = shared.family_passes(choice, bins, own=own if layout.cp == 1 else None)
    for each in (passes, own_passes(own, batches)):
        assert pipeline_bound_s(model, machine, choice, each, len(batches)) <= price.step_s


SMALL = read_model("layers=8,hidden=2048,heads=16,kv_heads=4,vocab=32000")


def small(usable_gib: float, host_gib: float = 200.0, devices: int = 4) -> ClusterSpec:
    whole = find_cluster(f"h100-sxm:{devices}")
    one = whole.classes[0]
    device = dataclasses.replace(
        one.device,
        memory_bytes=int(usable_gib * 2**30) + one.device.reserved_bytes,
        host_memory_bytes=int(host_gib * 2**30),
    )
    return dataclasses.replace(whole, classes=(dataclasses.replace(one, device=device),))


def search(gib: float, host_gib: float = 200.0, **fixed: int | str) -> tuple[Search, Outcome]:
    machine = Machine(small(gib, host_gib))
    space = list_space(SMALL, 4, StepOptions(4096, 8), fixed=fixed)
    found = Search(SMALL, machine, space, gap=0.0)
    return found, search_offloaded(found, found.run())


def brute(found: Search) -> dict[int, float]:
    """Step time of every number of a choice that fits."""
    times = {}
    for row in range(len(OFFLOADS) * len(found.space)):
        choice = found.space.choice(row)
        try:
            price = price_step(SMALL, found.machine, choice.layout, choice.options)
        except (LayoutError, SpecError):
            continue
        if price.fits:
            times[row] = price.step_s
    return times


@pytest.mark.long
@pytest.mark.parametrize(
    ("gib", "host_gib", "fixed"),
    [
        (2.5, 200.0, {"schedule": "1f1b"}),
        (4.0, 200.0, {"recompute": "full"}),
        (4.0, 1.0, {"schedule": "1f1b"}),
        (40.0, 200.0, {"recompute": "none"}),
    ],
    ids=str,
)
def test_the_answer_is_that_of_pricing_every_choice_with_every_offloading(
    gib: float, host_gib: float, fixed: dict[str, str]
) -> None:
    found, outcome = search(gib, host_gib, cp=1, micro_batch=2, replicas=1, order="dp-pp", **fixed)
    truth = min(brute(found).values(), default=np.inf)
    assert outcome.progress.best_s == truth
    assert outcome.progress.bound_s <= truth
    if outcome.fitting:
        best = found.space.choice(outcome.fitting[0].row)
        assert outcome.fitting[0].step_s == truth
        assert price_step(SMALL, found.machine, best.layout, best.options).step_s == truth
