"""A run obeys a plan where nobody said otherwise."""

from pathlib import Path

import pytest

from equipoise.base.errors import PlanError, SpecError
from equipoise.spec.run.load import read_run
from equipoise.spec.run.obey import obey

DECIDED = {"layout.dp": 1, "layout.pp": 2, "layout.schedule": "zb-v", "layout.zero": 1}
COMMAND = "equipoise plan run.toml --ranks 2"


def test_what_was_decided_stands_and_says_where_it_comes_from() -> None:
    run = read_run(None, [("train.steps", "70")])
    found = obey(run, DECIDED, COMMAND)
    layout = found.spec.layout
    assert (layout.dp, layout.pp, layout.schedule, layout.zero) == (1, 2, "zb-v", 1)
    assert found.spec.train == run.spec.train and found.model == run.model
    assert found.origins["layout.dp"] == "plan.lock"
    assert found.origins["train.steps"] == "--train.steps"
    assert found.digest != run.digest


def test_a_key_that_agrees_may_be_given(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[layout]\ndp = "cores"\nzero = 1\n')
    assert obey(read_run(file), DECIDED, COMMAND).spec.layout.dp == 1


def test_a_key_that_says_otherwise_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[layout]\nzero = 3\n")
    with pytest.raises(SpecError) as caught:
        obey(read_run(file), DECIDED, COMMAND)
    assert str(caught.value) == (
        "layout.zero = 3 (run.toml:2) contradicts the plan, which says 1. Omit it, or plan "
        'with it: "equipoise plan run.toml --ranks 2".'
    )
    with pytest.raises(SpecError) as caught:
        obey(read_run(file, [("layout.schedule", "1f1b")]), DECIDED, COMMAND)
    assert str(caught.value) == (
        'layout.schedule = "1f1b" (--layout.schedule) and layout.zero = 3 (run.toml:2) contradict '
        'the plan, which says "zb-v" and 1. Omit them, or plan with them: "equipoise plan '
        'run.toml --ranks 2".'
    )


@pytest.mark.parametrize(
    ("decided", "message"),
    [
        ({"layout.dpp": 1}, "layout.dpp: no such key. Nearest: layout.dp."),
        (
            {"layout.zero": "x"},
            'layout.zero: "x" is not one of 0, 1, 2, 3.',
        ),
        ({"layout.zero": 9}, "layout.zero: 9 is not one of 0, 1, 2, 3."),
        ({"layout.skip": -1.0}, "layout.skip: -1.0 is too small; it must be at least 0."),
    ],
)
def test_a_plan_that_sets_what_no_run_can_is_refused(decided: dict, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        obey(read_run(None), decided, COMMAND)
    assert str(caught.value) == f'The plan sets {message} Plan again: "{COMMAND}".'
