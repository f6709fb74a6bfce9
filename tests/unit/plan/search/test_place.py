"""Placement: never worse than as given, best on small clusters, deterministic."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError
from equipoise.plan.search.place import Placement, order_s, place_nodes, placed
from equipoise.spec.cluster.spec import ClusterSpec, find_cluster
from equipoise.spec.layout import Layout

ASKED = {"hop_bytes": 1e8, "ring_bytes": 1e9}


def grown(nodes: int, seed: int) -> ClusterSpec:
    draw = np.random.default_rng(seed)
    matrix = draw.uniform(50e9, 400e9, (nodes, nodes))
    matrix = np.minimum(matrix, matrix.T)
    return dataclasses.replace(find_cluster(f"h100-sxm:{8 * nodes}"), node_bytes_per_s=matrix)


def cost(cluster: ClusterSpec, layout: Layout, order: tuple[int, ...]) -> float:
    there = placed(cluster, Placement(order, 0.0, 0.0))
    return order_s(there, layout, **ASKED)


@settings(deadline=None, max_examples=4)
@given(st.integers(0, 2**31), st.sampled_from([(4, 1, 8), (2, 2, 8), (1, 4, 8), (2, 4, 4)]))
def test_the_best_order_of_a_small_cluster(seed: int, degrees: tuple[int, int, int]) -> None:
    dp, pp, tp = degrees
    layout, cluster = Layout(dp=dp, pp=pp, tp=tp), grown(4, seed)
    found = place_nodes(cluster, layout, **ASKED)
    assert found.after_s <= found.before_s
    assert sorted(found.nodes) == [0, 1, 2, 3]
    assert cost(cluster, layout, found.nodes) == pytest.approx(found.after_s)
    every = [cost(cluster, layout, order) for order in itertools.permutations(range(4))]
    assert found.after_s == pytest.approx(min(every))


def test_a_slow_pair_is_kept_apart() -> None:
    matrix = np.full((6, 6), 400e9)
    matrix[0, 1] = matrix[1, 0] = 10e9
    cluster = dataclasses.replace(find_cluster("h100-sxm:48"), node_bytes_per_s=matrix)
    found = place_nodes(cluster, Layout(pp=6, tp=8), **ASKED)
    assert found == place_nodes(cluster, Layout(pp=6, tp=8), **ASKED)
    assert abs(found.nodes.index(0) - found.nodes.index(1)) > 1
    assert found.after_s < 0.5 * found.before_s


def test_a_cluster_without_measured_pairs() -> None:
    with pytest.raises(LayoutError) as caught:
        place_nodes(find_cluster("h100-sxm:16"), Layout(dp=2, tp=8), **ASKED)
    assert str(caught.value) == (
        "h100-sxm:16 has no matrix of pairs and 1 classes of nodes. Give node_gbyte_per_s, and "
        "nodes of one class."
    )
