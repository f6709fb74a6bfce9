"""What ``auto`` chooses by: the same for a run, its simulation and its resumption."""

import dataclasses
import json
from pathlib import Path

from equipoise.balance.context.price import TILE_S
from equipoise.cost.step.request import StepOptions
from equipoise.sim.machine import Machine
from equipoise.sim.settle.sharding import auto_price, context_price, run_price, settle_machine
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import preset
from equipoise.spec.run.resolved import ContextMachine, ResolvedFile, read_resolved, write_resolved
from equipoise.spec.run.spec import LayoutSpec, PackSpec, RunSpec

MODEL = preset("2m")
SPEC = RunSpec(
    pack=PackSpec(context_tokens=4096, step_tokens=8192),
    layout=LayoutSpec(dp=1, cp=2, sharding="auto"),
)
OPTIONS = StepOptions(4096, 2, precision="fp32", sharding="auto")


def test_links_within_a_node_and_between_nodes_are_those_of_the_cluster() -> None:
    machine = Machine(find_cluster("h100-sxm:16"))
    options = StepOptions(8192, 16, sharding="auto")
    price = context_price(preset("llama3-8b"), machine, Layout(cp=16), options).machine
    assert price.link_in_node is not None
    assert price.link_in_node.bytes_per_s > 4 * price.link.bytes_per_s
    assert (price.ranks_per_node, price.block, price.tile_s) == (8, 128, TILE_S)
    assert 1e14 < price.flop_per_s < 989e12


def test_nothing_is_priced_where_nothing_is_chosen() -> None:
    machine = Machine(find_cluster("this-cpu:2"))
    assert auto_price(MODEL, machine, Layout(dp=2), OPTIONS) is None
    mixed = dataclasses.replace(OPTIONS, sharding="mixed")
    assert auto_price(MODEL, machine, Layout(cp=2), mixed) is None
    alone = dataclasses.replace(SPEC, layout=LayoutSpec(dp=2, sharding="auto"))
    assert settle_machine(alone, MODEL, 2, Path("nowhere")) is None
    assert run_price(None, SPEC, MODEL) is None


def test_a_run_and_its_simulation_choose_by_the_same_price(tmp_path: Path) -> None:
    settled = settle_machine(SPEC, MODEL, 2, tmp_path)
    simulated = auto_price(MODEL, Machine(find_cluster("this-cpu:2")), Layout(cp=2), OPTIONS)
    assert run_price(settled, SPEC, MODEL) == simulated


def test_a_run_that_is_resumed_keeps_what_it_began_with(tmp_path: Path) -> None:
    begun = ContextMachine(1e9, 1e-3, 2e-3, 5e6)
    file = ResolvedFile(SPEC, MODEL, {}, 2, "corpus", "", begun)
    write_resolved(tmp_path, file)
    assert settle_machine(SPEC, MODEL, 2, tmp_path) == begun
    other = dataclasses.replace(MODEL, layers=MODEL.layers + 1)
    assert settle_machine(SPEC, other, 2, tmp_path) != begun


def test_a_folder_of_a_run_without_auto_is_read_as_before(tmp_path: Path) -> None:
    write_resolved(tmp_path, ResolvedFile(SPEC, MODEL, {}, 2, "corpus", ""))
    table = json.loads((tmp_path / "resolved.json").read_text())
    assert table.pop("context_machine") is None
    del table["digest"]
    (tmp_path / "resolved.json").write_text(json.dumps(table))
    assert read_resolved(tmp_path).context_machine is None
