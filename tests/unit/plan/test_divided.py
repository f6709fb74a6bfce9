"""Choices that divide documents: bounds below prices, layouts that run, answers of a search."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.packing.turns import require_policy
from equipoise.base.errors import LayoutError, SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.answer.final import price_finalists
from equipoise.plan.bounds.roofline import needed_bytes, peak_bound_s
from equipoise.plan.search.evaluate import Estimates
from equipoise.plan.search.search import Search
from equipoise.plan.space.columns import SCHEDULES, Space
from equipoise.plan.space.listing import list_space
from equipoise.sim.machine import Machine
from equipoise.spec.catalog import POLICIES, Policy
from equipoise.spec.cluster.spec import find_cluster
from support.bounded_spaces import MODELS
from support.drawn_batches import packer_of

DIVIDES = [name for name, traits in POLICIES.items() if traits.divides]


@functools.cache
def space_of(model: str, devices: int, micro: int, policies: tuple[Policy, ...]) -> Space:
    base = StepOptions(4096, micro * devices)
    return list_space(MODELS[model], devices, base, policies=policies)


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from([name for name in DIVIDES if not POLICIES[name].is_slow]),  # packs for seconds
    st.integers(0, 2**31),
    st.integers(0, 2**31),
)
def test_no_bound_exceeds_the_price(name, devices, micro, policy, at, seed) -> None:
    model, machine = MODELS[name], Machine(find_cluster(f"h100-sxm:{devices}"))
    space = space_of(name, devices, micro, (policy,))
    row = at % len(space)
    looks = Estimates(model, machine, space, packer_of(model, space.base, seed))
    priced = looks.price(row)
    if priced is None:
        return
    one = space.keep(np.array([row]))
    assert peak_bound_s(model, machine, one, has_documents=True)[0] <= priced.step_s
    assert needed_bytes(model, machine, one, has_documents=True)[0] <= priced.memory_bytes
    branches = looks.branch(np.array([row]), 0.0, np.inf)
    if len(branches.too_large):
        assert priced.memory_bytes > machine.capacity_bytes
    for least, _ in branches.families:
        assert least <= priced.step_s
    assert looks.family_s(row) <= priced.step_s
    assert looks.own_s(row) <= priced.step_s


def test_the_space_has_the_layouts_that_train_runs() -> None:
    space = space_of("dense", 8, 4, ("by-work", *DIVIDES))
    listed = set()
    for row in range(len(space)):
        choice = space.choice(row)
        layout, options = choice.layout, choice.options
        require_policy(options.policy, context=layout.cp, pipeline=layout.pp)
        listed.add(
            dataclasses.replace(options, policy="") if POLICIES[options.policy].divides else None
        )
    assert len(listed) > 1
    plain = space["policy"] == space["policy"][0]
    over_time = plain & (space["pp"] > 1) & (space["cp"] == 1)
    over_time &= space["schedule"] == SCHEDULES.index("1f1b")
    together = plain & (space["pp"] * space["cp"] == 1)
    count = int(plain.sum() + over_time.sum() + 4 * together.sum())
    assert len(space) == count


@pytest.mark.long
def test_a_search_finds_the_best_of_all_rows() -> None:
    model, machine = MODELS["dense"], Machine(find_cluster("h100-sxm:8"))
    fixed = {"micro_batch": 1, "recompute": "none", "zero": 1, "schedule": "1f1b", "order": "dp-pp"}
    base = StepOptions(4096, 8)
    policies: tuple[Policy, ...] = ("by-work", "divided", "gangs", "divided-in-time")
    space = list_space(model, 8, base, fixed=fixed, policies=policies)
    pack = packer_of(model, base, seed=3)
    outcome = Search(model, machine, space, packer=pack).run()
    each = Estimates(model, machine, space, pack)
    prices = [found for row in range(len(space)) if (found := each.price(row)) is not None]
    best = min(found.step_s for found in prices if found.memory_bytes <= machine.capacity_bytes)
    assert outcome.fitting[0].step_s <= best * 1.01
    assert outcome.progress.bound_s <= best
    search = Search(model, machine, space, packer=pack)
    finalists = price_finalists(search, search.run())
    whole = {found.run.price.useful_flop for found in finalists}
    assert len(whole) == 1


def test_layers_of_their_own_keep_documents_whole() -> None:
    model, machine = MODELS["dense"], Machine(find_cluster("h100-sxm:4"))
    space = space_of("dense", 4, 1, ("gangs",))
    search = Search(model, machine, space, packer=packer_of(model, space.base, seed=1))
    with pytest.raises(LayoutError) as refused:
        search.whole_documents(space.choice(0))
    assert str(refused.value) == (
        'pack.policy = "gangs" divides documents, and layers of their own, or stages on several '
        'classes of nodes, are priced with whole documents. Take pack.policy = "by-work", or one '
        "layout of all layers on one class of nodes."
    )


def test_a_policy_without_a_layout_is_refused() -> None:
    with pytest.raises(SpecError):
        list_space(MODELS["dense"], 4, StepOptions(4096, 4), fixed={"cp": 2}, policies=("gangs",))
