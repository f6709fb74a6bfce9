"""The price by which ``layout.parts = "auto"`` chooses."""

import dataclasses
from pathlib import Path

import pytest

from equipoise.cost.overlap import parts_on
from equipoise.sim.settle import parts as priced
from equipoise.sim.settle.parts import part_machine, settle_parts
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import preset
from equipoise.spec.run.resolved import PartMachine, ResolvedFile, write_resolved
from equipoise.spec.run.spec import LayoutSpec, RunSpec

MODEL = preset("2m")
SPEC = RunSpec(layout=LayoutSpec(dp=1, tp=2, parts="auto"))


def test_only_auto_is_priced() -> None:
    for layout in (LayoutSpec(dp=1, tp=2, parts=4), LayoutSpec(dp=2, parts="auto")):
        spec = dataclasses.replace(SPEC, layout=layout)
        assert settle_parts(spec, MODEL, 2, Path("nowhere")) is None


def test_a_run_that_is_resumed_keeps_what_it_began_with(tmp_path: Path) -> None:
    begun = PartMachine(1e9, 1e-3, 5e6, 0.5)
    write_resolved(tmp_path, ResolvedFile(SPEC, MODEL, {}, 2, "corpus", "", part_machine=begun))
    assert settle_parts(SPEC, MODEL, 2, tmp_path) == begun
    other = dataclasses.replace(MODEL, layers=MODEL.layers + 1)
    assert settle_parts(SPEC, other, 2, tmp_path) != begun


def test_cores_that_send_leave_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, layout = find_cluster("this-cpu:2"), Layout(tp=2)
    large = {"flop": 1e12, "moved_bytes": 1e9}
    for cores, shared in ((2, 1.0), (4, 0.0)):
        monkeypatch.setattr(priced, "usable_cores", lambda cores=cores: list(range(cores)))
        machine = part_machine(cluster, MODEL, layout, precision="fp32")
        assert machine.shared == shared
        assert (parts_on(machine, **large) == 1) == (shared == 1.0)


def test_devices_hide_large_exchanges_and_leave_small_ones_whole() -> None:
    model, layout = preset("llama3-8b"), Layout(tp=8)
    machine = part_machine(find_cluster("h100-sxm:8"), model, layout, precision="bf16")
    assert machine.shared == 0.0

    def chosen(tokens: int) -> int:
        flop = 6.0 * tokens * model.hidden * model.ffn / 8
        return parts_on(machine, flop=flop, moved_bytes=2.0 * tokens * model.hidden * 2 * 7 / 8)

    assert chosen(16) == 1 < chosen(8192)
    assert [chosen(tokens) for tokens in (16, 512, 8192)] == sorted(
        chosen(tokens) for tokens in (16, 512, 8192)
    )
