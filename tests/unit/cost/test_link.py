"""Collectives: priced by where ranks stand; no time beats the slowest link."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.cost.curves.collectives import nccl_rows
from equipoise.cost.link import OPS, Op, collective_s, group_of, strided_group
from equipoise.spec.cluster.link import find_link
from equipoise.spec.cluster.spec import ClusterSpec, find_cluster, node_class

H100 = find_cluster("h100-sxm:512")
FROST = find_cluster("mi250x:64")
BYTES = np.geomspace(1e3, 1e10, 15)
POWERS = st.integers(0, 5).map(lambda power: 2**power)


@given(st.sampled_from(OPS), POWERS, POWERS, st.sampled_from([H100, FROST]))
def test_stride_and_named_ranks_are_priced_alike(op: Op, size: int, stride: int, cluster) -> None:
    size = min(size, cluster.devices // stride)
    by_stride = collective_s(op, BYTES, strided_group(cluster, size, stride))
    by_name = collective_s(op, BYTES, group_of(cluster, np.arange(size) * stride))
    assert np.allclose(by_stride.s, by_name.s, rtol=1e-12)
    assert (by_stride.extrapolated == by_name.extrapolated).all()


@given(st.sampled_from(OPS), st.integers(2, 64), POWERS)
def test_no_collective_beats_its_links_and_more_bytes_take_longer(
    op: Op, size: int, stride: int
) -> None:
    size = min(size, 512 // stride)
    if size < 2:
        return
    found = collective_s(op, BYTES, strided_group(H100, size, stride))
    growth = found.s[1:] / found.s[:-1]
    assert (growth > 0.85).all()  # below 10 kB measurements waver
    assert (growth[2:] > 0.95).all()
    in_node = min(size, max(1, 8 // stride))
    moved = {"all_reduce": 2 * (size - 1) / size, "send": 1.0, "broadcast": 1.0}.get(
        op, (size - 1) / size
    )
    peak = 450e9
    if size > in_node:
        peak = 50e9 * (in_node if op not in ("send", "all_to_all") else 1)
        moved = (size - in_node) / size if op == "all_to_all" else moved
    elif op == "all_reduce":
        moved /= 2  # switches of NVLink 4 add up what passes: half the bytes of a ring
    assert (found.s >= 0.999 * moved * BYTES / peak).all()


@pytest.mark.parametrize("op", OPS)
def test_a_group_of_one_costs_nothing(op: Op) -> None:
    found = collective_s(op, BYTES, strided_group(H100, 1, 8))
    assert (found.s == 0).all()
    assert not found.extrapolated.any()


def test_measured_points_are_met_inside_a_node() -> None:
    for name, cluster in (("h100", "h100-sxm:8"), ("a100", "a100-80:8")):
        rows = nccl_rows(name)
        means: dict[tuple[str, int, int], list[float]] = {}
        for op, ranks, size, s in rows:
            means.setdefault((op, ranks, size), []).append(np.log(s))
        for (op, ranks, size), logs in means.items():
            found = collective_s(op, size, strided_group(find_cluster(cluster), ranks, 1))
            assert float(found.s) == pytest.approx(np.exp(np.mean(logs)), rel=1e-9)
            assert not found.extrapolated


def test_beyond_the_measured_sizes_and_ranks_is_flagged() -> None:
    sizes = np.array([1 << 29, 1 << 31])
    assert collective_s("all_gather", sizes, strided_group(H100, 8, 1)).extrapolated.tolist() == [
        False,
        True,
    ]
    assert collective_s("all_gather", 1e6, strided_group(H100, 2, 8)).extrapolated
    assert collective_s("broadcast", 1e6, strided_group(H100, 8, 1)).extrapolated


def test_tensor_parallelism_over_two_nodes_loses_to_one() -> None:
    inside = collective_s("all_reduce", 64e6, strided_group(H100, 8, 1))
    across = collective_s("all_reduce", 64e6, strided_group(H100, 16, 1))
    alone = collective_s("all_reduce", 64e6, strided_group(H100, 16, 8))
    assert float(inside.s) < float(across.s) < float(alone.s)


def test_two_dies_of_a_package_are_the_fastest_pair() -> None:
    times = [
        float(collective_s("all_reduce", 1e8, group_of(FROST, pair)).s)
        for pair in ([0, 1], [0, 2], [0, 8])
    ]
    assert times == sorted(times)
    assert times[1] > 3 * times[0]


@given(st.permutations(range(8)))
def test_renumbering_nodes_changes_nothing(order: list[int]) -> None:
    ranks = [8 * node for node in order]
    found = collective_s("all_reduce", BYTES, group_of(H100, ranks))
    plain = collective_s("all_reduce", BYTES, strided_group(H100, 8, 8))
    assert np.allclose(found.s, plain.s)


def _of_nic(nic: str) -> ClusterSpec:
    plain = node_class("a100-80", 32)
    return ClusterSpec(nic, (dataclasses.replace(plain, nic=find_link(nic)),))


def test_network_cards_rank_as_they_do_in_holmes() -> None:
    times = [
        float(collective_s("all_reduce", 7.2e9, strided_group(_of_nic(nic), 32, 1)).s)
        for nic in ("ib-hdr", "roce-200", "ethernet-25")
    ]
    assert times == sorted(times)
    assert len(set(times)) == 3


def test_a_group_over_two_classes_crosses_the_link_between_them() -> None:
    classes = (node_class("h100-sxm", 16), node_class("a100-80", 16))
    ethernet = find_link("ethernet-25")
    both = ClusterSpec("both", classes, ethernet)
    within = collective_s("all_reduce", 1e9, group_of(both, [0, 8]))
    across = collective_s("all_reduce", 1e9, group_of(both, [8, 16]))
    assert float(across.s) > 5 * float(within.s)
    assert float(across.s) > 1e9 / (ethernet.bytes_per_s / 8)
    message = (
        'Ranks 8 and 16 stand in "h100-sxm" and "a100-80", and apart has no link between '
        "classes. Give cluster.between, or keep the group within a class."
    )
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        group_of(ClusterSpec("apart", classes), [8, 16])


def test_a_measured_matrix_slows_the_ring_that_crosses_its_slow_pair() -> None:
    rates = np.full((4, 4), 400e9)
    rates[0, 2] = rates[2, 0] = 40e9
    cluster = ClusterSpec("matrix", (node_class("h100-sxm", 32),), None, rates)
    slow = collective_s("all_gather", 1e9, group_of(cluster, [0, 16, 8, 24]))
    # 0 -> 1 -> 2 -> 3 -> 0 passes by the pair of nodes 0 and 2.
    fast = collective_s("all_gather", 1e9, group_of(cluster, [0, 8, 16, 24]))
    assert float(slow.s) > 5 * float(fast.s)
    message = (
        "matrix has 1 classes of nodes or measured links, so the price depends on where a group "
        "is. Name its ranks."
    )
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        strided_group(cluster, 4, 8)


def test_a_rank_named_twice() -> None:
    message = "A group of 3 ranks names 1 of them twice. Name each once."
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        group_of(H100, [0, 1, 1])
