"""Sources of a cluster's numbers: each once, and what stands in or is guessed says so."""

import dataclasses

import pytest

from equipoise.cost.curves.sources import sources_of
from equipoise.spec.cluster.link import find_link
from equipoise.spec.cluster.spec import (
    CLUSTERS,
    ClusterSpec,
    find_cluster,
    node_class,
    node_size,
)
from equipoise.spec.device.by_name import DEVICES


@pytest.mark.parametrize("name", DEVICES)
def test_every_number_of_a_cluster_has_a_source(name: str) -> None:
    cluster = find_cluster(f"{name}:{2 * node_size(DEVICES[name])}")
    found = sources_of(cluster, "bf16")
    assert dict(cluster.device.sources).items() <= found.items()
    assert found["node"] == CLUSTERS[name]
    of = cluster.classes[0]
    links = {tier.link for tier in of.tiers} | ({of.nic} if of.nic else set())
    for link in links:
        assert found[f"link {link.name}"] == link.source
        assert (f"collectives over {link.name}" in found) == (link.curve is not None)
    assert all(found.values())


def test_what_stands_in_says_so() -> None:
    measured = sources_of(find_cluster("h100-sxm:16"), "bf16")
    other = sources_of(find_cluster("v100-32:16"), "fp16")
    assert sources_of(find_cluster("v100-32:16"), "bf16")["precision"] == (
        "fp16, for v100-32 multiplies no bf16"
    )
    assert "precision" not in measured
    assert measured["matrix products"].endswith("/gemm_perf.parquet")
    assert other["matrix products"].endswith("; taken over to v100-32 by its roofline")
    assert "A100-SXM4-80GB" in other["attention"]
    assert measured["collectives over nvlink4"].endswith("/nccl_perf.parquet")
    assert other["collectives over nvlink2"].endswith("; taken over by the links' rates")
    assert measured["under load"] == (
        "products x 1.13, messages x 1.24: fitted on 475 published steps of nine sources, each "
        "left out in turn"
    )


def test_a_guess_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = sources_of(find_cluster("this-cpu:2"), "fp32")
    assert found["matrix products"] == "a guess: 60% of the fp32 peak of this-cpu"
    assert "guess" in found["link gloo"]
    assert "under load" not in found


def test_of_several_classes_each_has_its_name() -> None:
    two = ClusterSpec(
        "two", (node_class("h100-sxm", 8), node_class("a100-80", 8)), find_link("ethernet-25")
    )
    found = sources_of(two, "bf16")
    assert found["link ethernet-25"] == find_link("ethernet-25").source
    assert "A100" in found["a100-80: peaks"] and "H100" in found["h100-sxm: peaks"]
    rates = dataclasses.replace(two, node_bytes_per_s=[[0.0, 1e9], [1e9, 0.0]])
    assert sources_of(rates, "bf16")["links between nodes"] == "the cluster file: node_gbyte_per_s"
