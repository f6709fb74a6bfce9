"""What sites could do that is not synchronous: never silently, and as declared."""

import dataclasses

import pytest

from equipoise.cost.step.request import StepOptions
from equipoise.plan.answer.across import (
    LOCAL_STEPS,
    SitesStep,
    across_remarks,
    step_of_sites,
    trunk_rate,
)
from equipoise.plan.described import PlanRequest
from equipoise.plan.request import plan
from equipoise.plan.search.deadline import NEVER
from equipoise.plan.search.search import Search
from equipoise.plan.space.listing import list_space
from equipoise.sim.machine import Machine
from equipoise.spec.cluster.link import find_link
from equipoise.spec.cluster.spec import ClusterSpec, node_class
from equipoise.spec.words import read_model

MODEL = read_model("layers=4,hidden=1024,heads=8,vocab=1000")
SITES = ClusterSpec(
    "sites",
    tuple(dataclasses.replace(node_class("h100-sxm", 8), name=name) for name in ("a", "b")),
    find_link("ethernet-25"),
    trunk_bytes_per_s=10e9,
)


def search_site(site: ClusterSpec, sequences: int) -> Search:
    fixed = {"tp": 1, "pp": 1, "cp": 1, "recompute": "none", "micro_batch": 1}
    base = StepOptions(2048, sequences)
    return Search(MODEL, Machine(site), list_space(MODEL, site.devices, base, fixed=fixed))


def test_each_site_trains_its_share_alone() -> None:
    step = step_of_sites(SITES, 64, MODEL.params, search_site, NEVER)
    assert step is not None
    alone = search_site(ClusterSpec("a", SITES.classes[:1]), 32).run().fitting[0]
    assert step.step_s == alone.step_s and step.layouts == ("dp=8,zero=1",)
    assert step.exchange_s(4.0) == pytest.approx(
        MODEL.params * 4.0 / trunk_rate(SITES) + 2 * SITES.between.latency_s
    )
    made: list[str] = []

    def counted(site: ClusterSpec, sequences: int) -> Search:
        made.append(site.name)
        return search_site(site, sequences)

    assert step_of_sites(SITES, 64, MODEL.params, counted, NEVER) == step
    assert made == ["b"]  # alike, so searched once, with all the time
    slower = dataclasses.replace(SITES.classes[1], nic=find_link("ib-edr"))
    apart = dataclasses.replace(SITES, classes=(SITES.classes[0], slower))
    assert step_of_sites(apart, 64, MODEL.params, counted, NEVER) is not None
    assert made == ["b", "a", "b"]
    uneven = step_of_sites(SITES, 63, MODEL.params, search_site, NEVER)
    one = step_of_sites(ClusterSpec("a", SITES.classes[:1]), 64, MODEL.params, search_site, NEVER)
    assert uneven is one is None


def test_a_trunk_is_shared_and_a_port_is_not_exceeded() -> None:
    link = find_link("ethernet-25")
    assert trunk_rate(SITES) == link.bytes_per_s * link.efficiency  # one node's port is narrower
    many = tuple(dataclasses.replace(each, nodes=100) for each in SITES.classes)
    wide = dataclasses.replace(SITES, classes=many)
    assert trunk_rate(wide) == 10e9 * link.efficiency
    assert trunk_rate(dataclasses.replace(wide, trunk_bytes_per_s=None)) == pytest.approx(
        100 * link.bytes_per_s * link.efficiency
    )


def test_ways_are_said_with_their_effect_and_only_where_they_gain() -> None:
    step = SitesStep(2.0, ("dp=8,zero=1",), 1_000_000_000, 1e9, 0.0, 2, 8)
    assert across_remarks(step, 2.0, 4.0) == []
    small, late, local = across_remarks(step, 8.0, 4.0)
    assert all(
        each.startswith("Not equal to synchronous SGD, so not chosen: ")
        for each in (small, late, local)
    )
    assert "3.00 s a step, 2.67 times as fast" in small and "what was rounded off" in small
    assert "4.00 s a step, 2.00 times as fast" in late and "one update older" in late
    assert f"joined every {LOCAL_STEPS} steps (DiLoCo, arXiv:2311.08105): 2.01 s" in local
    assert "steps of its own on 1/2 of the sequences" in local
    assert local.endswith("which holds 0.93 GiB more on each device.")


def test_sites_that_cannot_share_a_step_say_so(tmp_path) -> None:
    file = tmp_path / "sites.toml"
    nodes = "".join(
        f'[[nodes]]\nname = "{name}"\ndevice = "h100-sxm"\nnodes = 1\n' for name in ("a", "b")
    )
    file.write_text(f'name = "s"\nbetween = "roce-400"\ntrunk_gbit_per_s = 400\n{nodes}')
    words = "layers=2,hidden=256,heads=8,vocab=1000"
    request = PlanRequest(words, str(file), 1024, 3, layout="tp=8,pp=2", seconds=20)
    assert (
        "Local updates and late or compressed gradients between sites are not priced, as no step "
        "of a site alone was found. Give more --seconds, or a number of sequences that sites can "
        "share by their devices."
    ) in plan(request).lock.remarks
