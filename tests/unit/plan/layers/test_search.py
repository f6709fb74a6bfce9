"""Plans by layer: never slower than one strategy for all, and the best of all on small spaces."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.cost.step.request import StepOptions
from equipoise.plan.layers.search import lagrangian_bound_s, plan_base, plan_layers
from equipoise.plan.layers.table import list_strategies, price_strategies
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.listing import list_space
from equipoise.sim.machine import Machine
from equipoise.sim.mixed.layers import LayerStrategy
from equipoise.sim.mixed.replay import run_layered
from equipoise.spec.cluster.spec import ClusterSpec, find_cluster
from equipoise.spec.words import read_model

MODEL = read_model("layers=8,hidden=2048,heads=16,kv_heads=4,vocab=32000")


def cluster(usable_gib: float, devices: int) -> ClusterSpec:
    whole = find_cluster(f"h100-sxm:{devices}")
    one = whole.classes[0]
    size = int(usable_gib * 2**30) + one.device.reserved_bytes
    small = dataclasses.replace(one, device=dataclasses.replace(one.device, memory_bytes=size))
    return dataclasses.replace(whole, classes=(small,))


def searched(gib: float, devices: int, model=MODEL, **fixed: int | str) -> Search:
    space = list_space(model, devices, StepOptions(4096, 16), fixed=fixed)
    return Search(model, Machine(cluster(gib, devices)), space, gap=0.0)


@pytest.mark.parametrize(
    ("gib", "fixed"),
    [
        (8.0, {"cp": 1, "pp": 1}),
        (9.0, {"cp": 1, "pp": 4, "order": "pp-dp", "schedule": "1f1b"}),
        (9.0, {"cp": 1, "pp": 2, "order": "dp-pp", "virtual": 2}),
        (10.0, {"pp": 1, "zero": 1, "micro_batch": 2}),
    ],
    ids=str,
)
def test_never_slower_than_one_strategy_for_all(gib: float, fixed: dict[str, int | str]) -> None:
    search = searched(gib, 8, **fixed)
    outcome = search.run()
    found = plan_layers(search, outcome)
    if found is not None:
        assert found.run.price.fits
        assert found.run.price.step_s < outcome.fitting[0].step_s
        assert len(found.layers) == MODEL.layers
        again = run_layered(
            MODEL, search.machine, found.choice.layout, found.choice.options, found.layers
        )
        assert again.price.step_s == found.run.price.step_s


@pytest.mark.parametrize("gib", [3.5, 6.0, 6.5])
def test_the_fastest_of_all_assignments(gib: float) -> None:
    model = dataclasses.replace(MODEL, layers=3)
    search = searched(gib, 2, model, pp=1, cp=1, zero=1, micro_batch=2)
    base = search.run().fitting[0].row
    choice = search.space.choice(base)
    strategies = list_strategies(search.space, base, has_documents=False)
    table = price_strategies(search, choice, strategies)
    assert len(table.strategies) >= 3
    best = np.inf
    for path in itertools.product(table.strategies, repeat=3):
        run = run_layered(model, search.machine, choice.layout, choice.options, path)
        if run.price.fits:
            best = min(best, run.price.step_s)
    found = plan_base(search, base)
    assert found is not None
    assert best <= found.run.price.step_s <= 1.002 * best


def test_stages_that_hold_more_recompute_more() -> None:
    search = searched(5.0, 4, cp=1, tp=1, pp=4, zero=1, micro_batch=2, schedule="1f1b")
    outcome = search.run()
    found = plan_layers(search, outcome)
    assert found is not None
    assert found.run.price.step_s < outcome.fitting[0].step_s
    again = [each.recompute != "none" for each in found.layers]
    assert any(again) and not all(again)
    assert sum(again[:4]) > sum(again[4:])


def test_documents_are_kept_where_they_are_packed() -> None:
    def pack(choice: Choice) -> list[list[list[int]]]:
        count = choice.options.count_micro_batches(choice.layout)
        whole = choice.options.micro_batch * 4096
        return [[[1000, whole - 1000]] * count for _ in range(choice.layout.dp)]

    space = list_space(MODEL, 8, StepOptions(4096, 16), fixed={"pp": 1, "zero": 1})
    search = Search(MODEL, Machine(cluster(9.0, 8)), space, packer=pack)
    outcome = search.run()
    base = outcome.fitting[0].row
    dp = int(space["dp"][base])
    strategies = list_strategies(space, base, has_documents=True)
    assert {each.layout.dp for each in strategies} == {dp}
    found = plan_base(search, base)
    assert found is not None and found.run.price.tokens == 16 * 4096


def test_zero_2_pays_for_every_micro_batch() -> None:
    machine = Machine(cluster(40.0, 8))
    for sequences, pays in ((8, False), (16, True)):
        space = list_space(MODEL, 8, StepOptions(4096, sequences), fixed={"tp": 1, "zero": 1})
        alone = Search(MODEL, machine, space)
        base = next(
            space.choice(row)
            for row in range(len(space))
            if space["dp"][row] == 8 and space["micro_batch"][row] == 1
        )
        once, again = (
            price_strategies(
                alone,
                base,
                [LayerStrategy(dataclasses.replace(base.layout, zero=zero), "none")],
            ).seconds[0, 0]
            for zero in (1, 2)
        )
        assert (again > once) == pays


def test_zero_2_is_listed_where_a_step_is_one_micro_batch() -> None:
    for sequences, stages in ((8, {0, 1, 2, 3}), (16, {0, 1, 3})):
        fixed = {"pp": 1, "cp": 1, "tp": 1, "micro_batch": 1}
        space = list_space(MODEL, 8, StepOptions(4096, sequences), fixed=fixed)
        strategies = list_strategies(space, 0, has_documents=False)
        assert {each.layout.zero for each in strategies} == stages
        assert {each.recompute for each in strategies} == {
            *("none", "attention", "selective", "full")
        }


@given(st.data())
def test_no_assignment_takes_less_than_the_bound(data: st.DataObject) -> None:
    layers, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    size = st.lists(st.floats(0.01, 10.0), min_size=layers * count, max_size=layers * count)
    seconds, needs = (np.array(data.draw(size)).reshape(layers, count) for _ in range(2))
    room, each = data.draw(st.floats(0.0, 40.0)), np.arange(layers)
    fastest = min(
        (
            float(seconds[each, chosen].sum())
            for chosen in itertools.product(range(count), repeat=layers)
            if needs[each, chosen].sum() <= room
        ),
        default=np.inf,
    )
    assert lagrangian_bound_s(seconds, needs, room) <= fastest * (1 + 1e-9)


def test_where_memory_is_to_spare_the_bound_is_the_fastest() -> None:
    seconds, needs = np.array([[2.0, 1.0], [5.0, 3.0]]), np.array([[1.0, 2.0], [1.0, 9.0]])
    assert lagrangian_bound_s(seconds, needs, 100.0) == 4.0
    assert lagrangian_bound_s(seconds, needs, 1.9) == np.inf
