"""Rings on a two-level network: fair rates by linear programs, plans by all assignments."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from equipoise.base.errors import SpecError
from equipoise.sim.traffic.clos import (
    ClosSpec,
    Flows,
    cable_loads,
    hash_spines,
    leaf_of,
    link_uses,
    plan_spines,
    ring_flows,
)
from equipoise.sim.traffic.fair import fair_rates
from equipoise.sim.traffic.request import TrafficRequest, simulate_traffic
from support.verbs import run


def fair_by_programs(uses: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """The slowest as fast as can be, then the next: a linear program for each."""
    rings = uses.shape[1]
    fixed = dict.fromkeys(range(rings))
    while None in fixed.values():
        open_ = [ring for ring, rate in fixed.items() if rate is None]
        bounds = [(0, None) if rate is None else (rate, rate) for rate in fixed.values()]

        def most(ring: int, floor: float, bounds=bounds, open_=open_) -> float:
            """The largest rate of a ring where each open one has at least ``floor``."""
            above = [(floor, None) if r in open_ else b for r, b in enumerate(bounds)]
            goal = -np.eye(len(above))[ring]
            return -linprog(goal, A_ub=uses, b_ub=capacity, bounds=above, method="highs").fun

        columns = np.hstack([uses, np.zeros((len(uses), 1))])
        least = np.zeros((len(open_), rings + 1))
        for row, ring in enumerate(open_):
            least[row, ring], least[row, rings] = -1, 1  # the level is at most each open rate
        done = linprog(
            [0.0] * rings + [-1.0],
            A_ub=np.vstack([columns, least]),
            b_ub=np.concatenate([capacity, np.zeros(len(open_))]),
            bounds=[*bounds, (0, None)],
            method="highs",
        )
        level = -done.fun
        stuck = [
            ring for ring in open_ if most(ring, level * (1 - 1e-9)) <= level * (1 + 1e-6) + 1e-9
        ]
        fixed |= dict.fromkeys(stuck, level)
    return np.array([fixed[ring] for ring in range(rings)])


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_rates_are_those_of_linear_programs(data: st.DataObject) -> None:
    links, rings = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    shape = (links, rings)
    drawn = data.draw(st.lists(st.integers(0, 2), min_size=links * rings, max_size=links * rings))
    uses = np.array(drawn, dtype=float).reshape(shape)
    uses[0] = np.maximum(uses[0], 1)  # every ring crosses a link
    capacity = np.array(
        data.draw(st.lists(st.integers(1, 9), min_size=links, max_size=links)), dtype=float
    )
    rates = fair_rates(uses, capacity)
    assert rates == pytest.approx(fair_by_programs(uses, capacity), rel=1e-5)
    load = uses @ rates
    assert (load <= capacity * (1 + 1e-9)).all()
    for ring in range(rings):  # it crosses a full link on which nobody is faster
        full = (load >= capacity * (1 - 1e-6)) & (uses[:, ring] > 0)
        assert any(
            rates[uses[link] > 0].max() <= rates[ring] * (1 + 1e-9) for link in full.nonzero()[0]
        )


def drawn_flows(data: st.DataObject, clos: ClosSpec, most: int) -> Flows:
    ends = st.integers(0, clos.nodes - 1)
    pairs = data.draw(st.lists(st.tuples(ends, ends), min_size=1, max_size=most))
    source, target = np.array(pairs, dtype=np.int64).T
    return Flows(np.arange(len(pairs)), source, target, np.ones(len(pairs)))


def degrees(clos: ClosSpec, flows: Flows) -> np.ndarray:
    """Crossing flows of each leaf, out and in."""
    begin, end = leaf_of(clos, flows.source), leaf_of(clos, flows.target)
    far = begin != end
    return np.stack([np.bincount(each[far], minlength=clos.leaves) for each in (begin, end)])


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_no_assignment_has_a_less_full_cable_than_the_plan(data: st.DataObject) -> None:
    clos = ClosSpec(data.draw(st.integers(2, 3)), data.draw(st.integers(1, 3)), 2, 1, 1.0, 1.0)
    flows = drawn_flows(data, clos, 6)
    planned = int(cable_loads(clos, flows, plan_spines(clos, flows)).max())
    every = itertools.product(range(clos.spines), repeat=len(flows.ring))
    best = min(int(cable_loads(clos, flows, np.array(each)).max()) for each in every)
    assert planned == best


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_plan_meets_its_bound_on_any_network(data: st.DataObject) -> None:
    clos = ClosSpec(data.draw(st.integers(2, 9)), data.draw(st.integers(1, 9)), 3, 1, 1.0, 1.0)
    flows = drawn_flows(data, clos, 90)
    spines = plan_spines(clos, flows)
    loads, bound = cable_loads(clos, flows, spines), -(-degrees(clos, flows) // clos.spines)
    assert spines.min() >= 0 and spines.max() < clos.spines
    assert (loads.max(axis=2) == bound).all()  # of every leaf, not of the fullest alone
    assert loads.sum() == degrees(clos, flows).sum()


def test_permutation_traffic_gets_what_its_cards_send() -> None:
    """C4P's case: as many spines as cards of a leaf, and each card sends to one other."""
    clos = ClosSpec(4, 8, 4, 2, 50.0, 50.0)
    flows = ring_flows(clos, [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]])
    planned = fair_rates(*link_uses(clos, flows, plan_spines(clos, flows)))
    assert planned == pytest.approx([100.0] * 4)
    for seed in range(20):
        hashed = fair_rates(*link_uses(clos, flows, hash_spines(clos, flows, seed)))
        assert (hashed <= planned * (1 + 1e-9)).all() and hashed.min() < 100.0


def test_two_rings_that_meet_on_a_cable_halve_each_other() -> None:
    clos = ClosSpec(2, 2, 2, 1, 10.0, 10.0)
    flows = ring_flows(clos, [[0, 2], [1, 3]])
    together, apart = np.zeros(4, dtype=np.int64), np.array([0, 0, 1, 1])
    assert fair_rates(*link_uses(clos, flows, together)).tolist() == [5.0, 5.0]
    assert fair_rates(*link_uses(clos, flows, apart)).tolist() == [10.0, 10.0]


def test_more_flows_of_a_connection_collide_less_and_a_plan_goes_around_lost_spines() -> None:
    one = simulate_traffic(TrafficRequest("h100-sxm:128", 4, draws=10))
    four = simulate_traffic(TrafficRequest("h100-sxm:128", 4, draws=10, split=4))
    assert one.gain > four.gain > 1
    assert (one.planned.rates == one.limit_bytes_per_s).all()
    lost = simulate_traffic(TrafficRequest("h100-sxm:128", 4, draws=10, lost_spines=8, split=3))
    assert lost.planned.fullest.tolist() == [4.0]  # 96 flows of a leaf on 24 spines
    assert lost.planned.rates / lost.limit_bytes_per_s == pytest.approx(0.75)


def test_the_verb_prints_both_and_the_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("explain", "traffic", "--cluster", "h100-sxm:128", "--leaf-nodes", 4, "--draws", 5)
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert "hashed (ECMP)" in out and "planned (C4P)" in out
    assert "arXiv:2406.04594" in out and "Simulated: " in out
    code, out, _ = run(capsys, *words, "--json")
    row = json.loads(out)
    assert (code, row["spines"], row["rings"], row["ways"][1]["fullest_flows"]) == (0, 32, 4, 1.0)
    code, out, _ = run(capsys, *words, "--quiet")
    assert (
        out
        == f"Planned paths give 4 rings {row['gain']:.2f} times what hashed ones do (simulated).\n"
    )


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (
            TrafficRequest("h100-sxm:128", 5),
            "16 nodes do not make two or more leaves of 5. Give --leaf-nodes that divides 16, and "
            "at most 8.",
        ),
        (
            TrafficRequest("h100-sxm:8", 1),
            "1 nodes do not make two or more leaves of 1. Give --leaf-nodes that divides 1, and at "
            "most 0.",
        ),
        (
            TrafficRequest("h100-sxm:128", 4, ring_nodes=5),
            "Rings of 5 nodes, no two of a ring beside each other in a leaf, cannot take all 16 "
            "nodes of 4 leaves. Give --ring-nodes from 2 to 4 that divides 16.",
        ),
        (
            TrafficRequest("h100-sxm:128", 4, ring_nodes=0),
            "Rings of 0 nodes, no two of a ring beside each other in a leaf, cannot take all 16 "
            "nodes of 4 leaves. Give --ring-nodes from 2 to 4 that divides 16.",
        ),
        (
            TrafficRequest("h100-sxm:128", 4, lost_spines=32),
            "A leaf of 32 cards at oversubscription 1 has 32 spines; 32 cannot be lost. Give fewer "
            "--lost-spines.",
        ),
        (
            TrafficRequest("h100-sxm:128", 4, draws=0),
            "0 draws of 1 flows a connection at oversubscription 1: give 1 or more draws and "
            "flows, and a ratio above 0.",
        ),
        (
            TrafficRequest("h100-sxm:128", 4, draws=10_001),
            "10,001 draws from seed 0: give 10,000 draws or fewer, and a seed of 0 or more.",
        ),
        (
            TrafficRequest("h100-sxm:128", 4, seed=-1),
            "100 draws from seed -1: give 10,000 draws or fewer, and a seed of 0 or more.",
        ),
        (
            TrafficRequest("h100-sxm:128", 4, split=1000),
            "128,000 flows are more than 100,000. Give a smaller cluster or fewer --flows.",
        ),
        (
            TrafficRequest("this-cpu:2", 1),
            "is not one kind of node with network cards, which a planned network needs. Give a "
            "cluster of equal nodes, as h100-sxm:512.",
        ),
    ],
)
def test_what_is_no_network_is_refused(request_: TrafficRequest, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        simulate_traffic(request_)
    assert str(caught.value).endswith(said)


@pytest.mark.parametrize(
    ("rings", "said"),
    [
        ([[0]], "Each ring needs two nodes or more, and each node belongs to one ring."),
        ([[0, 1], [1, 2]], "Each ring needs two nodes or more, and each node belongs to one ring."),
        ([[0, 9]], "Node 9 is not in a network of 4 nodes, numbered from 0."),
    ],
)
def test_rings_that_are_none_are_refused(rings: list[list[int]], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        ring_flows(ClosSpec(2, 2, 2, 1, 1.0, 1.0), rings)
    assert str(caught.value) == said


def test_a_network_without_spines_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        ClosSpec(2, 0, 2, 1, 1.0, 1.0)
    assert str(caught.value) == (
        "2 leaves of 2 nodes with 1 network cards and 0 spines: give 1 or more of each, and rates "
        "above 0."
    )
