"""A cluster at a precision."""

import pytest

from equipoise.cost.step.request import TERMS
from equipoise.sim.machine import Machine
from equipoise.sim.parts import StepParts
from equipoise.spec.cluster.link import find_link
from equipoise.spec.cluster.spec import ClusterSpec, find_cluster
from equipoise.spec.layout import Layout
from support.machines import MODEL, h100, options


def test_a_precision_is_another_machine_that_is_made_once() -> None:
    machine = Machine(find_cluster("this-cpu:2"))
    wide = machine.at("fp32")
    assert wide is machine.at("fp32") and wide.at("fp32") is wide
    assert wide.at("bf16") is machine and machine.at("fp8") is machine
    assert wide.peak_flop_per_s("fp32") == machine.device.peak_flop_per_s("fp32")
    assert machine.peak_flop_per_s("fp32") == wide.peak_flop_per_s("fp32")
    assert wide.extrapolated is machine.extrapolated


def test_kernels_are_those_of_the_class_that_multiplies_slowest() -> None:
    # In BF16 an H20 has 148 TFLOP/s and a die of MI250X 191.5, though its peak in FP8 is above.
    classes = tuple(find_cluster(f"{name}:8").classes[0] for name in ("mi250x", "h20"))
    mixed = ClusterSpec("x", classes, find_link("roce-400"))
    assert [Machine(mixed, name).device.name for name in ("bf16", "fp32")] == ["h20", "h20"]
    alike = tuple(find_cluster(f"{name}:8").classes[0] for name in ("h200", "h100-sxm"))
    assert Machine(ClusterSpec("x", alike, find_link("roce-400"))).device.name == "h100-sxm"


def test_full_precision_moves_twice_the_bytes_and_never_multiplies_faster() -> None:
    machine, layout = h100(2), Layout(tp=2)
    narrow, wide = (
        StepParts(MODEL, machine, layout, options(precision=name)).price([4096])
        for name in ("bf16", "fp32")
    )
    moved, products = TERMS.index("element-wise"), TERMS.index("products")
    ratio = wide.layers[0][0] / narrow.layers[0][0].clip(1e-30)
    assert ratio[moved] == pytest.approx(2)
    assert ratio[products] >= 1
    assert wide.layers[0][0, TERMS.index("tensor traffic")] > 0
