"""Stages on clusters of several classes: faster ones get more layers, equal ones are as one."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError
from equipoise.sim.answer import step_row
from equipoise.sim.machine import Machine
from equipoise.sim.mixed.replay import run_sites
from equipoise.sim.mixed.sites import (
    find_sites,
    name_sites,
    rank_of_stages,
    room_bytes,
    split_by_speed,
)
from equipoise.sim.parts import StepParts
from equipoise.sim.step import run_step
from equipoise.spec.cluster.link import find_link
from equipoise.spec.cluster.spec import ClusterSpec, node_class
from equipoise.spec.device.by_name import find_device
from equipoise.spec.layout import ATTENTION_AXES, Layout
from support.machines import MODEL, h100, options

PP_DP = ("pp", "dp", "cp", "tp")
DEEP = dataclasses.replace(MODEL, layers=12)


def mixed(*names: str, between: str = "ethernet-25", **changes: Any) -> ClusterSpec:
    """Nodes of eight, a class each."""
    classes = [
        dataclasses.replace(node_class(name, 8), name=f"{name}-{at}", nic=find_link("roce-200"))
        for at, name in enumerate(names)
    ]
    return ClusterSpec("grown", tuple(classes), find_link(between))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dp, cp, tp, pp = (draw(st.integers(1, 4)) for _ in range(4))
    order = tuple(draw(st.permutations(ATTENTION_AXES)))
    return Layout(dp=dp, cp=cp, tp=tp, pp=pp, order=order)


@given(layouts(), st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_stages_stand_where_their_ranks_do(layout: Layout, nodes: list[int]) -> None:
    # Nodes of one device, the last class with as many more as the layout needs.
    nodes[-1] += max(0, layout.world - sum(nodes))
    classes = [
        dataclasses.replace(node_class("h100-sxm", 1), name=str(at), nodes=count)
        for at, count in enumerate(nodes)
    ]
    cluster = ClusterSpec("grown", tuple(classes), find_link("ethernet-25"))
    grid = layout.grid("pp", "dp", "cp", "tp").reshape(layout.pp, -1)
    names = [[classes[at].name for at in np.unique(row)] for row in cluster.class_of(grid)]
    assert name_sites(cluster, layout) == ["+".join(each) for each in names]
    for rank, site in enumerate(find_sites(Machine(cluster), layout)):
        alike = next(at for at in range(layout.pp) if names[at] == names[rank])
        stage = alike if layout.pp > 1 else 0
        assert site.stand(grid[0]).tolist() == grid[stage].tolist()


def test_a_faster_class_gets_more_layers() -> None:
    machine = Machine(mixed("a100-80", "h100-sxm"))
    layout = Layout(pp=2, dp=8, order=PP_DP)
    found = run_sites(DEEP, machine, layout, options(step_sequences=64))
    assert found.layers[1] > found.layers[0]
    slow = run_step(DEEP, machine, layout, options(step_sequences=64))
    assert found.price.step_s < slow.price.step_s
    turned = run_sites(
        DEEP, Machine(mixed("h100-sxm", "a100-80")), layout, options(step_sequences=64)
    )
    assert turned.layers[0] > turned.layers[1]


def test_classes_that_are_alike_price_as_one() -> None:
    layout, asked = Layout(pp=2, dp=8, order=PP_DP), options(step_sequences=64)
    one = run_step(DEEP, h100(16), layout, asked)
    two = ClusterSpec(
        "two", (node_class("h100-sxm", 8), node_class("h100-sxm", 8)), find_link("ib-ndr")
    )
    found = run_sites(DEEP, Machine(two), layout, asked)
    assert found.layers == one.layers
    assert found.price.memory_bytes == pytest.approx(one.price.memory_bytes, rel=1e-6)
    assert found.price.busy_s == pytest.approx(one.price.busy_s)
    assert found.price.step_s == pytest.approx(one.price.step_s, rel=0.1)  # one port a node
    assert run_sites(DEEP, h100(16), layout, asked).price.step_s == one.price.step_s


@pytest.mark.parametrize(("virtual", "schedule"), [(1, "1f1b"), (2, "interleaved"), (2, "zb-v")])
def test_the_best_of_all_splits(virtual: int, schedule: str) -> None:
    machine = Machine(mixed("a100-80", "h100-sxm"))
    layout = Layout(pp=2, dp=8, order=PP_DP)
    asked = options(step_sequences=64, virtual=virtual, schedule=schedule)
    parts = [
        StepParts(DEEP, site, layout, asked).price(np.array([4096.0]))
        for site in find_sites(machine, layout)
    ]
    split = split_by_speed(parts, layout, asked)
    place = rank_of_stages(layout, asked).tolist()
    worst = []
    for inner in itertools.combinations(range(1, DEEP.layers), len(place) - 1):
        edges = (0, *inner, DEEP.layers)
        times = [
            sum(parts[rank].layers[layer].sum() for layer in range(low, high))
            for rank, (low, high) in zip(place, itertools.pairwise(edges), strict=True)
        ]
        times[0] += parts[place[0]].first.sum()
        times[-1] += parts[place[-1]].last.sum()
        worst.append(max(times))
    assert split.loads.max() == pytest.approx(min(worst))


def test_groups_stand_where_their_ranks_do() -> None:
    cluster = mixed("a100-80", "h100-sxm", "h100-sxm")
    machine = Machine(cluster)
    inside = Layout(pp=3, dp=8, order=PP_DP)
    assert name_sites(cluster, inside) == ["a100-80-0", "h100-sxm-1", "h100-sxm-2"]
    across = Layout(pp=3, dp=8)
    assert name_sites(cluster, across) == ["a100-80-0+h100-sxm-1+h100-sxm-2"] * 3
    sites = find_sites(machine, inside)
    assert [site.device.name for site in sites] == ["a100-80", "h100-sxm", "h100-sxm"]
    assert {site.device.name for site in find_sites(machine, across)} == {"a100-80"}
    for rank, site in enumerate(sites):
        ranks = inside.group_of(0, "dp")
        assert site.stand(ranks).tolist() == inside.group_of(inside.rank_at(pp=rank), "dp")
    assert sites[1].at("fp32").stand([0]).tolist() == [8]
    asked = options(step_sequences=64)
    apart = run_sites(DEEP, machine, inside, asked).price
    crossing = run_sites(DEEP, machine, across, asked).price
    assert apart.terms.get("data traffic", 0.0) < 0.1 * crossing.terms["data traffic"]
    assert apart.step_s < crossing.step_s


def test_each_stage_has_the_memory_of_its_own_devices() -> None:
    model, layout = dataclasses.replace(DEEP, vocab=32_000), Layout(pp=2, dp=8, order=PP_DP)
    machine = Machine(mixed("h100-sxm", "a100-40"))
    rooms = np.array([each.device.usable_bytes for each in machine.cluster.classes])
    fitting = []
    for size in (1, 2, 4, 8):
        asked = options(step_sequences=64, micro_batch=size)
        run = run_sites(model, machine, layout, asked)
        price, row = run.price, step_row(run, machine, asked)
        assert price.fits == bool((price.memory_bytes <= rooms).all())
        assert price.fits == (row["memory_gib_max"] <= row["capacity_gib"])
        assert sum(row["memory"].values()) == pytest.approx(row["memory_gib_max"])
        fitting.append(price.fits and price.memory_bytes.max() > rooms.min())
    assert any(fitting)
    # A stage that stands in both has that of the smaller device, whichever is faster.
    both = room_bytes(mixed("h20", "h100-sxm"), Layout(pp=1, dp=16))
    assert both.tolist() == [find_device("h100-sxm").usable_bytes]


def test_more_stages_than_layers_are_refused_or_empty_on_every_cluster() -> None:
    machine = Machine(mixed("h100-sxm", "a100-80"))
    few = dataclasses.replace(DEEP, layers=2)
    layout = Layout(pp=2, dp=8, order=PP_DP)
    run = run_sites(few, machine, layout, options(virtual=2, schedule="zb-v"))
    assert run.layers == (0, 1, 1, 0)  # the first rank has both ends, and no layer
    with pytest.raises(LayoutError) as refused:
        run_sites(few, machine, layout, options(virtual=3, schedule="interleaved"))
    assert str(refused.value) == (
        "2 layers cannot fill 2 x 3 stages. Give virtual = 1 or less, or fewer stages."
    )


def test_rows_of_experts_cross_what_joins_the_classes() -> None:
    cluster = mixed("h100-sxm", "h100-sxm")
    narrow = dataclasses.replace(cluster, trunk_bytes_per_s=2e9)
    nodes = ClusterSpec("one", (dataclasses.replace(cluster.classes[0], nodes=2),))
    rates = []
    for each in (nodes, cluster, narrow):
        routes = Machine(each).expert_routes(tuple(range(16)), lambda count: count)
        assert routes is not None and routes.nodes == 2
        rates.append(routes.far_bytes_per_s)
    # Eight network cards a node, one port of 25 Gb/s, and a pipe that eight devices share.
    assert rates == [25e9, 3.125e9 / 8, 2e9 / 8]
    within = Machine(cluster).expert_routes(tuple(range(8)), lambda count: count)
    assert within is not None and (within.nodes, within.far_bytes_per_s) == (1, 0.0)


def test_without_stages_the_slowest_class_sets_the_pace() -> None:
    machine, layout = Machine(mixed("a100-80", "h100-sxm")), Layout(dp=16)
    asked = options()
    found = run_sites(MODEL, machine, layout, asked).price
    assert found.step_s == run_step(MODEL, machine, layout, asked).price.step_s
