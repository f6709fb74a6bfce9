"""Bounds never exceed prices: of memory, of the device's peak, of kernels, of families."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError, SpecError
from equipoise.cost.step.request import Precision, Stack
from equipoise.plan.answer.run_steps import COMPARED
from equipoise.plan.bounds.group import group_bound_s
from equipoise.plan.bounds.kernels import Kernels, own_passes
from equipoise.plan.bounds.pipeline import pipeline_bound_s
from equipoise.plan.bounds.roofline import bubble, memory_bound_bytes, peak_bound_s
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import Space
from equipoise.plan.space.packs import sort_batches
from equipoise.sim.parts import StepParts
from equipoise.sim.step import price_step
from equipoise.spec.program.file import read_program
from support.bounded_spaces import MODELS, draws, setting
from support.drawn_batches import batches_of, packer_of

STACKS = {
    "ours": Stack(),
    "hosted": Stack(host_launch_s=2e-5, host_experts_s=2e-3),
    "theirs": Stack(attention="unfused", sequence_parallel=False, split="equal", dropout=True),
    **{name: read_program(name).stack for name in ("megatron-core", "torchtitan-eager")},
}


@settings(deadline=None, max_examples=25)
@given(*draws(STACKS), st.sampled_from([1, 64, 1000]), st.sampled_from(["drawn", *COMPARED]))
def test_no_bound_exceeds_the_price(name, devices, stack, micro, at, seed, grain, policy) -> None:
    model = MODELS[name]
    machine, space = setting(name, devices, STACKS[stack], micro)
    row = at % len(space)
    choice = space.choice(row)
    layout, options = choice.layout, choice.options
    batches = batches_of(choice, seed)
    if seed is not None and policy != "drawn":
        asked = Choice(layout, dataclasses.replace(options, policy=policy))
        batches = packer_of(model, space.base, seed)(asked)[at % layout.dp]
    try:
        own = StepParts(model, machine, layout, options)
        price = price_step(model, machine, layout, options, documents=[batches], parts=own)
    except (LayoutError, SpecError):
        return
    one = space.keep(np.array([row]))
    has_documents = seed is not None
    needs = memory_bound_bytes(model, one, has_documents=has_documents)[0]
    assert needs <= price.memory_bytes.max() * (1 + 1e-9)
    assert peak_bound_s(model, machine, one, has_documents=has_documents)[0] <= price.step_s
    shared, bins = Kernels(model, machine), sort_batches(batches, grain)
    kernels = shared.group_passes(choice, bins)
    assert kernels.busy_s / layout.pp <= price.step_s * (1 + 1e-9)
    assert kernels.once_s <= price.step_s * (1 + 1e-9)
    together = group_bound_s(
        model, machine, space, np.array([row]), kernels, {}, has_documents=has_documents
    )
    assert together[0] <= price.step_s
    passes = shared.family_passes(choice, bins, own=own if layout.cp == 1 else None)
    median = own.price(bins.typical.astype(np.float64))
    split = dataclasses.replace(passes, typical=median, splits={})
    for each in (passes, split, own_passes(own, batches)):
        assert pipeline_bound_s(model, machine, choice, each, len(batches)) <= price.step_s


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_row_that_fits_is_never_ruled_out(precision: Precision) -> None:
    machine, listed = setting("dense", 8, STACKS["ours"], 8)
    space = Space(listed.columns, dataclasses.replace(listed.base, precision=precision))
    needs = memory_bound_bytes(MODELS["dense"], space)
    small = np.argsort(needs)[:: len(needs) // 40]
    for row in small.tolist():
        choice = space.choice(row)
        try:
            price = price_step(MODELS["dense"], machine, choice.layout, choice.options)
        except (LayoutError, SpecError):
            continue
        assert needs[row] <= price.memory_bytes.max() * (1 + 1e-9)


def test_the_bubble_of_1f1b() -> None:
    assert bubble([1, 4, 16, 4], [8, 8, 16, 2]).tolist() == [1.0, 1.375, 1.0, 2.0]
