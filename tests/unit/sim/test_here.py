"""Steps on this machine from parts that were timed on it."""

import dataclasses
from pathlib import Path

import pytest

from equipoise.cost.step.request import Residuals, StepOptions
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import own_cluster
from equipoise.spec.device.here import calibrated_device
from equipoise.spec.layout import Layout
from support.device_files import A_FILE, written
from support.timed_parts import MODEL, parts

OPTIONS = StepOptions(1024, 8, precision="fp32", residuals=Residuals())
EVEN = [[[64] * 16] * 2] * 2
LAYOUTS = (
    Layout(dp=2, zero=0),
    Layout(dp=2, zero=3),
    Layout(cp=2),
    Layout(tp=2),
    Layout(pp=2),
)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    found = dataclasses.replace(A_FILE, parts=(parts(),))
    return Machine(own_cluster(calibrated_device(found, written(tmp_path, found)), 2))


def core_s(documents: list[int], us: float) -> float:
    return sum(us * 1e-6 * tokens**2 for tokens in documents)


def test_a_step_of_a_timed_size_costs_its_timed_parts(machine: Machine) -> None:
    found = price_step(MODEL, machine, Layout(dp=2), OPTIONS, documents=EVEN)
    layer, head, core = 1e-5 + 1024e-5, 1e-5 + 2048e-5, core_s([64] * 16, 1e-3)
    batch = MODEL.layers * (3 * layer + 4 * core) + 3 * head
    once = (MODEL.layers + 1) * (1e-3 + 2e-3 + 3e-3) + 5e-3
    assert found.step_s == pytest.approx(2 * batch + once, rel=1e-3)
    assert sum(found.terms.values()) == pytest.approx(found.step_s)
    assert found.terms["host"] == pytest.approx(5e-3)
    assert not found.extrapolated


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_more_work_is_never_faster_and_terms_add_up(machine: Machine, layout: Layout) -> None:
    rows = [[[300, 700], [64] * 16]] * layout.dp
    base = price_step(MODEL, machine, layout, OPTIONS, documents=rows)
    assert sum(base.terms.values()) == pytest.approx(base.step_s)
    deeper = dataclasses.replace(MODEL, layers=6)
    longer = [[[1000], [64] * 16]] * layout.dp
    again = dataclasses.replace(OPTIONS, recompute="full")
    assert price_step(deeper, machine, layout, OPTIONS, documents=rows).step_s > base.step_s
    assert price_step(MODEL, machine, layout, OPTIONS, documents=longer).step_s > base.step_s
    steps = [base.step_s]
    for recompute in ("attention", "selective", "full"):
        options = dataclasses.replace(OPTIONS, recompute=recompute)
        steps.append(price_step(MODEL, machine, layout, options, documents=rows).step_s)
    assert steps == sorted(steps) and steps[0] < steps[1]
    assert price_step(MODEL, machine, layout, again, documents=rows).step_s == steps[-1]


def test_ranks_that_meet_in_each_micro_batch_go_at_the_slower_ones_pace(machine: Machine) -> None:
    rows = [[[900], [100]], [[100], [900]]]
    apart = price_step(MODEL, machine, Layout(dp=2, zero=1), OPTIONS, documents=rows)
    meeting = price_step(MODEL, machine, Layout(dp=2, zero=3), OPTIONS, documents=rows)
    assert meeting.step_s > 1.5 * apart.step_s


def test_a_backward_in_halves_has_its_own_times(machine: Machine) -> None:
    rows = [[[64] * 16] * 4]
    whole, halves = (
        price_step(
            MODEL,
            machine,
            Layout(pp=2),
            dataclasses.replace(OPTIONS, schedule=schedule),
            documents=rows,
        )
        for schedule in ("1f1b", "zb-h1")
    )
    assert halves.busy_s.sum() > whole.busy_s.sum()  # 2.1 forwards for 2
    assert halves.bubble_s.max() < whole.bubble_s.max()


def test_what_was_not_timed_is_priced_from_kernels(machine: Machine) -> None:
    beyond = price_step(MODEL, machine, Layout(dp=2), OPTIONS, documents=[[[64] * 64]] * 2)
    assert "parts of a step" in beyond.extrapolated
    ring = dataclasses.replace(OPTIONS, context_strategy="ring")
    found = price_step(MODEL, machine, Layout(cp=2), ring, documents=[[[512]]])
    assert "launches" in found.terms
    narrow = dataclasses.replace(OPTIONS, precision="bf16")
    other = price_step(MODEL, machine, Layout(dp=2), narrow, documents=EVEN)
    assert "launches" in other.terms
