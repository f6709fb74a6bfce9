"""Clusters by name: every device has one node, links have sources, wrong words are told."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.spec.cluster.link import LINKS, find_link
from equipoise.spec.cluster.spec import CLUSTERS, ClusterSpec, find_cluster, node_class

TWO = ClusterSpec(
    "two", (node_class("h100-sxm", 16), node_class("a100-80", 8)), find_link("ethernet-25")
)


@pytest.mark.parametrize("name", [name for name in CLUSTERS if name != "this-cuda"])
def test_shipped_clusters_have_tiers_that_grow_to_the_node(name: str) -> None:
    cluster = find_cluster(f"{name}:16")
    of = cluster.classes[0]
    sizes = [tier.devices for tier in of.tiers]
    assert sizes == sorted(set(sizes))
    assert cluster.devices == 16
    assert cluster.is_uniform
    assert of.nodes == 16 // sizes[-1]
    assert CLUSTERS[name]


@pytest.mark.parametrize("link", LINKS.values(), ids=list(LINKS))
def test_links_have_a_source_and_a_share_of_their_peak(link) -> None:
    for number in ("efficiency", "latency"):
        assert number in link.source.lower()
    assert 0 < link.efficiency <= 1
    assert link.latency_s > 0


def test_a_part_of_a_node_has_its_part_of_the_cards() -> None:
    assert find_cluster("h100-sxm:2").classes[0].nics == 2
    assert find_cluster("h100-sxm:2").classes[0].devices_per_node == 2
    assert find_cluster("v100-32:64").classes[0].nic_bytes_per_s == 12.5e9 * 4 / 8
    assert [tier.devices for tier in find_cluster("mi250x:8").classes[0].tiers] == [2, 8]
    assert [tier.devices for tier in find_cluster("mi250x:2").classes[0].tiers] == [2]


@given(st.lists(st.integers(0, 23), min_size=1, max_size=24))
def test_each_device_has_one_node_and_place(ids: list[int]) -> None:
    node, place, kind = TWO.node_of(ids), TWO.place_in_node(ids), TWO.class_of(ids)
    assert (node * 8 + place == np.array(ids)).all()
    assert (kind == (np.array(ids) >= 16)).all()
    assert (TWO.devices, TWO.nodes, TWO.is_uniform) == (24, 3, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "h100-sxm",
            '"h100-sxm" is neither NAME:DEVICES, as in h100-sxm:8192, nor a cluster file that '
            f"ends in .toml. Names: {', '.join(CLUSTERS)}.",
        ),
        (
            "h1000:8",
            'No cluster is called "h1000". Nearest: h200. '
            f"Known: {', '.join(CLUSTERS)}; any other is a cluster.toml.",
        ),
        (
            "h100-sxm:99999999999999",
            "99,999,999,999,999 devices are too many. Give 1,048,576 or fewer.",
        ),
        (
            "h100-sxm:12",
            "12 devices of h100-sxm do not fill whole nodes of 8. Give 8 or 16.",
        ),
    ],
)
def test_wrong_words(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        find_cluster(text)


def test_a_device_that_is_not_there() -> None:
    message = (
        "h100-sxm:8 has 8 devices, numbered from 0, but no device 8. Give a cluster of 9 or "
        "more, or other ranks."
    )
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        find_cluster("h100-sxm:8").node_of([0, 8])


def test_a_wrong_link() -> None:
    message = f'No link is called "nvlink9". Nearest: nvlink5. Known: {", ".join(LINKS)}.'
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        find_link("nvlink9")
