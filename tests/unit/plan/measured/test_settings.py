"""What a run leaves open: legal layouts of the same ranks, no two alike, given keys as given."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.measured.settings import DEGREES, DIMENSIONS, Choices, list_choices
from equipoise.plan.space.accepted import require_accepted
from equipoise.plan.space.trainable import list_trainable, run_keys
from equipoise.spec.run.load import read_run
from equipoise.spec.run.obey import obey
from equipoise.spec.run.resolve import ResolvedRun

GIVEN = {
    "layout.zero": "2",
    "train.recompute": "full",
    "layout.cp": "1",
    "pack.policy": "in-order",
    "layout.schedule": "zb-v",
    "layout.strategy": "ulysses",
    "model.experts": "4",
}
BASE = StepOptions(8192, 4, precision="fp32")


def listed(run: ResolvedRun, ranks: int, base: StepOptions = BASE) -> Choices:
    return list_choices(run, ranks, base, count_batches=lambda dp: max(1, 4 // dp))


@settings(deadline=None, max_examples=12)
@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.sets(st.sampled_from(sorted(GIVEN))))
def test_choices(ranks: int, named: set[str]) -> None:
    base = [(name, GIVEN[name]) for name in sorted(named)]
    run = read_run(None, base)
    try:
        found = listed(run, ranks)
    except SpecError:
        # Three ranks share no heads, and six stages of zb-v no four layers.
        assert ranks in (1, 3) and {"train.recompute", "pack.policy"} <= named
        return
    assert found.settings.shape == (len(found.keys), len(DIMENSIONS))
    assert len(np.unique(found.settings, axis=0)) == len(found.keys) == len(found.laid)
    assert len({tuple(sorted(keys.items())) for keys in found.keys}) == len(found.keys)
    for keys, choice in zip(found.keys, found.laid, strict=True):
        assert not named & set(keys)
        tried = read_run(None, [*base, *keys.items()])
        assert tried.spec.layout.count_ranks(64) == ranks
        require_accepted(tried.spec, tried.model, ranks)
        # Obeyed as a plan it is what was tried.
        assert obey(run, run_keys(choice), "").spec == dataclasses.replace(
            tried.spec, layout=obey(tried, run_keys(choice), "").spec.layout
        )
        assert tried.spec.layout.of_ranks(ranks) == choice.layout
        assert tried.spec.layout.stages == choice.layout.pp * choice.options.virtual


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("keys", [[], [("layout.zero", "3")], [("model.experts", "4")]])
def test_every_choice_is_a_plans(ranks: int, keys: list[tuple[str, str]]) -> None:
    run = read_run(None, keys)
    space = list_trainable(run, ranks, BASE, count_batches=lambda dp: max(1, 4 // dp))
    plans = [run_keys(space.choice(row)) for row in range(len(space))]
    for choice in listed(run, ranks).laid:
        assert run_keys(choice) | {"pack.policy": "by-work"} in plans


def test_two_ranks() -> None:
    found = listed(read_run(None, []), 2)
    assert len(found.keys) == 36
    shapes = {tuple(keys[name] for name in DEGREES) for keys in found.keys}
    assert len(shapes) == 4
    stages = [keys["layout.zero"] for keys in found.keys if keys["layout.tp"] == "2"]
    assert set(stages) == {"1"}  # one rank holds all of a weight's share: nothing to shard
    assert {keys["pack.policy"] for keys in found.keys} == {"by-work", "by-tokens"}
    assert len(listed(read_run(None, [("layout.dp", "2")]), 2).keys) == 12
    cores = listed(read_run(None, [("layout.dp", "cores")]), 2)
    assert cores.keys == found.keys


def test_few_tokens_are_shared_by_who_asks() -> None:
    short = dataclasses.replace(BASE, context_tokens=1024)
    degrees = {keys["layout.cp"] for keys in listed(read_run(None), 2, short).keys}
    assert degrees == {"1"}
    asked = listed(read_run(None, [("layout.cp", "2")]), 2, short)
    assert {choice.layout.cp for choice in asked.laid} == {2}


@pytest.mark.parametrize(
    ("key", "value", "axis"),
    [("layout.schedule", "gpipe", "pp"), ("layout.strategy", "usp", "cp")],
)
def test_what_no_price_knows_is_tried(key: str, value: str, axis: str) -> None:
    found = listed(read_run(None, [(key, value)]), 2)
    assert len(found.laid) == 36
    said = {run_keys(each).get(key) for each in found.laid if each.layout.size(axis) > 1}
    assert said == {value}


@pytest.mark.parametrize(
    ("policy", "shapes"),
    [("divided", {(2, 1, 1, 1), (1, 1, 2, 1)}), ("divided-in-time", {(1, 1, 1, 2)})],
)
def test_a_policy_leaves_the_layouts_that_run_it(policy: str, shapes: set[Any]) -> None:
    found = listed(read_run(None, [("pack.policy", policy)]), 2)
    layouts = [each.layout for each in found.laid]
    assert {(each.dp, each.cp, each.tp, each.pp) for each in layouts} == shapes


def test_nothing_is_left() -> None:
    given_keys = [
        ("layout.dp", "2"),
        ("layout.zero", "1"),
        ("train.recompute", "none"),
        ("pack.policy", "by-work"),
    ]
    with pytest.raises(SpecError) as caught:
        listed(read_run(None, given_keys), 2)
    assert str(caught.value) == (
        "--measure needs two or more choices, and 2 ranks leave 1 with layout.dp (--layout.dp), "
        "layout.zero (--layout.zero), train.recompute (--train.recompute), pack.policy "
        "(--pack.policy) given. Remove one of these keys to search it."
    )
