"""Parameters and gradients that travel by virtual stages."""

import dataclasses

import pytest

from equipoise.cost.step.request import Stack, StepOptions
from equipoise.sim.machine import Machine
from equipoise.sim.parameters import exposed_by_stage_s
from equipoise.sim.step import exposed_s, run_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import preset

MACHINE = Machine(find_cluster("h100-sxm:32"))
MODEL = preset("llama3-8b")


def run(virtual: int, stack: Stack):
    schedule = "interleaved" if virtual > 1 else "1f1b"
    options = StepOptions(8192, 64, virtual=virtual, schedule=schedule, stack=stack)
    return run_step(MODEL, MACHINE, Layout(dp=8, pp=4), options)


@pytest.mark.parametrize("scale", [0.01, 0.2, 1.0, 30.0])
def test_one_stage_hides_what_its_first_and_last_pass_hide(scale: float) -> None:
    pipeline = run(1, Stack()).slowest
    for rank in range(4):
        one = exposed_s(pipeline, rank, scale, 2 * scale, layers=8, overlaps=True)
        staged = exposed_by_stage_s(pipeline.timeline, rank, scale, 2 * scale, layers=8)
        assert staged == pytest.approx(one, rel=1e-3, abs=1e-6)


def test_more_stages_expose_less() -> None:
    pipeline = run(4, Stack()).slowest
    for rank in range(4):
        beside = exposed_s(pipeline, rank, 3.0, 3.0, layers=8, overlaps=True)
        staged = exposed_by_stage_s(pipeline.timeline, rank, 3.0, 3.0, layers=8)
        assert staged[0] < beside[0] and staged[1] < beside[1]


def test_gradients_of_every_micro_batch_are_paid_for_all_the_same() -> None:
    for beside in (False, True):
        options = StepOptions(8192, 64, stack=Stack(stage_overlap=beside))
        one, two = (
            run_step(MODEL, MACHINE, Layout(dp=8, pp=4, zero=zero), options).price
            for zero in (1, 2)
        )
        assert two.terms["data traffic"] > 2 * one.terms["data traffic"]
        assert two.step_s > one.step_s


def test_a_step_never_takes_longer_for_it() -> None:
    without = Stack()
    beside = dataclasses.replace(without, stage_overlap=True)
    for virtual in (1, 2, 8):
        assert run(virtual, beside).price.step_s <= run(virtual, without).price.step_s * (1 + 1e-9)
