"""Stages of a run's pipeline in a plan.lock."""

import dataclasses
from pathlib import Path

import pytest

from equipoise.base.errors import PlanError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.answer.run_stages import require_stages, run_stages
from equipoise.plan.space.choice import Choice
from equipoise.sim.machine import Machine
from equipoise.sim.step import run_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import preset
from equipoise.spec.plan import Stages
from equipoise.spec.run.spec import LayoutSpec

FILE = Path("a/plan.lock")
MODEL = dataclasses.replace(preset("7m"), layers=6)


@pytest.mark.parametrize(
    ("layout", "schedule", "virtual", "ranks"),
    [
        (Layout(pp=2), "1f1b", 1, (0, 1)),
        (Layout(pp=2), "interleaved", 2, (0, 1, 0, 1)),
        (Layout(pp=2), "zb-v", 2, (0, 1, 1, 0)),
    ],
)
def test_what_a_plan_writes_is_taken(layout: Layout, schedule, virtual: int, ranks) -> None:
    options = StepOptions(512, 8, schedule=schedule, virtual=virtual, precision="fp32")
    run = run_step(MODEL, Machine(find_cluster("this-cpu:2")), layout, options)
    stages = run_stages(Choice(layout, options), run)
    assert stages is not None
    assert stages.ranks == ranks
    asked = LayoutSpec(pp=2, schedule=schedule, virtual=virtual)
    require_stages(stages, asked, MODEL.layers, FILE)


def test_no_pipeline_has_no_stages() -> None:
    options = StepOptions(512, 8, precision="fp32")
    run = run_step(MODEL, Machine(find_cluster("this-cpu:2")), Layout(dp=2), options)
    assert run_stages(Choice(Layout(dp=2), options), run) is None


@pytest.mark.parametrize(
    ("edges", "said"),
    [((0, 3, 5), "0 3 5"), ((1, 3, 6), "1 3 6"), ((0, 0, 6), "0 0 6"), ((0, 7, 6), "0 7 6")],
)
def test_edges_that_do_not_cover_the_layers_are_refused(edges, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        require_stages(Stages(edges, (0, 1)), LayoutSpec(pp=2), 6, FILE)
    assert str(caught.value) == (
        f"a/plan.lock splits layers at {said}, and the model has 6. Edges ascend from 0 to 6. "
        f"Correct the file, or plan again: equipoise plan run.toml."
    )


def test_stages_of_another_layout_are_refused() -> None:
    for stages, layout, said in (
        (
            Stages((0, 3, 6), (1, 0)),
            LayoutSpec(pp=2),
            "2 stages on ranks 1 0",
        ),
        (Stages((0, 6), (0,)), LayoutSpec(pp=2), "1 stages on ranks 0"),
    ):
        with pytest.raises(PlanError) as caught:
            require_stages(stages, layout, 6, FILE)
        assert str(caught.value) == (
            f"a/plan.lock has {said}, and this run's layout has 2 on ranks 0 1. Correct the file, "
            f"or plan again: equipoise plan run.toml."
        )
    with pytest.raises(PlanError, match="this run's layout has 1 on ranks 0"):
        require_stages(Stages((0, 3, 6), (0, 1)), LayoutSpec(pp=1), 6, FILE)
