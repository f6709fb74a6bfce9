"""A step's parts on real ranks: every way is timed, and another depth is foreseen from it."""

import dataclasses
from pathlib import Path

from equipoise.cost.curves.parts import part_curves
from equipoise.cost.step.request import StepOptions
from equipoise.observe.machine import usable_cores
from equipoise.schedule.attention.price import LinkPrice
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import own_cluster
from equipoise.spec.device.here import calibrated_device
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import preset
from equipoise.train.calibrate.model import measure_parts
from equipoise.train.calibrate.parts import ways_of
from equipoise.train.calibrate.parts_plan import PartsPlan
from support.device_files import A_FILE, written
from support.progresses import CountedStages

MODEL = dataclasses.replace(
    preset("2m"), hidden=32, heads=2, kv_heads=2, head_width=16, ffn=48, vocab=64, layers=2
)


def test_every_way_is_timed_and_foresees_another_depth(tmp_path: Path) -> None:
    stages, plan = CountedStages(), PartsPlan(MODEL, "fp32", 128, 128, steps=2)
    parts = measure_parts(plan, LinkPrice(1e-4, 1e9), stages)
    cores = min(len(usable_cores()), 16)
    assert stages.done == stages.total == len(parts.ways)
    assert tuple(way.way for way in parts.ways) == ways_of(MODEL, cores)
    assert (parts.ranks, parts.dtype, parts.most_tokens) == (cores, "fp32", 128)
    for way in parts.ways:
        assert [point.tokens for point in way.sizes] == [128]
        size = way.sizes[0]
        # Either may be 0, as they are told apart by the difference of two noisy times; not both.
        assert size.layer.forward_s.mid + size.last.forward_s.mid > 0 and way.step_s.mid > 0
        assert min(size.layer.forward_s.mid, size.last.forward_s.mid) >= 0
        assert [point.tokens for point in way.documents] == [16, 64, 128]
    if cores > 1:
        assert {point.strategy for point in parts.context} >= {"needed-kv", "ulysses"}

    found = dataclasses.replace(A_FILE, parts=(parts,))
    device = calibrated_device(found, written(tmp_path, found))
    layout, deep = Layout(dp=cores), dataclasses.replace(MODEL, layers=5)
    assert part_curves(device, deep, "fp32", layout) is not None
    options = StepOptions(128, 2, precision="fp32")
    machine = Machine(own_cluster(device, cores))
    price = price_step(deep, machine, layout, options, documents=[[[64, 64]]] * cores)
    assert price.step_s > 0 and "launches" not in price.terms
