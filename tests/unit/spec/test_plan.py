"""plan.lock: written is read back; other forms and other readings are refused by name."""

import dataclasses
import json
from pathlib import Path

import pytest

from equipoise.base.errors import PlanError
from equipoise.spec.plan import Candidate, Flip, Plan, Stages, Wall, read_plan, require_fresh
from support.planned_price import PRICE

BEST = Candidate({"layout": "dp=8", "micro-batch": "1"}, PRICE, {})
PLAN = Plan(
    asked={"model": "llama3-8b", "cluster": "h100-sxm:8"},
    best=BEST,
    runners_up=(dataclasses.replace(BEST, loses_by={"a": 0.25}),),
    bound_s=1.25,
    gap=0.1,
    listed=100,
    priced=10,
    wall=(Wall("window", 8192, 12_288, 90.0, 80.0),),
    flip=Flip("a", 1.5, "tp=2,dp=4"),
    nodes=(1, 0),
    read={"model": "1", "cluster": "2"},
    sources={"peaks": "a datasheet"},
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "plan.lock"
    PLAN.write(file)
    assert read_plan(file) == PLAN
    assert json.loads(file.read_text())["best"]["price"]["step_s"] == 1.5
    assert [each.name for each in tmp_path.iterdir()] == ["plan.lock"]
    require_fresh(PLAN, {"model": "1", "cluster": "2"}, file)


def test_stages_are_read_back_and_an_old_lock_has_none(tmp_path: Path) -> None:
    file = tmp_path / "plan.lock"
    best = dataclasses.replace(BEST, stages=Stages((0, 3, 4), (0, 1)))
    plan = dataclasses.replace(PLAN, best=best)
    plan.write(file)
    assert read_plan(file) == plan
    row = json.loads(json.dumps(plan.as_row()))
    assert row["best"].pop("stages") == {"edges": [0, 3, 4], "ranks": [0, 1]}
    assert "stages" not in row["runners_up"][0]
    file.write_text(json.dumps(row))
    assert read_plan(file) == PLAN
    file.write_text(json.dumps(row | {"best": row["best"] | {"stages": {"edges": ["all"]}}}))
    with pytest.raises(PlanError, match=r"is not a whole plan\.lock"):
        read_plan(file)


def test_an_edited_lock_is_refused_and_one_without_a_digest_is_read(tmp_path: Path) -> None:
    file = tmp_path / "plan.lock"
    PLAN.write(file)
    row = json.loads(file.read_text())
    row["best"]["words"]["micro-batch"] = "2"
    file.write_text(json.dumps(row))
    with pytest.raises(PlanError) as caught:
        read_plan(file)
    assert caught.value.exit_code == 4
    assert str(caught.value) == (
        f"{file} has changed since it was written, and its prices are of other choices than it "
        f'names. Plan again: "equipoise plan --out {tmp_path}".'
    )
    del row["digest"]
    file.write_text(json.dumps(row))
    assert read_plan(file).best.words["micro-batch"] == "2"


def test_keys_under_their_old_names_are_read_under_the_new_ones(tmp_path: Path) -> None:
    file = tmp_path / "plan.lock"
    row = PLAN.as_row()
    row["best"]["keys"] = {"layout.dp": 1, "layout.context": 2, "layout.expert_tensor": 1}
    file.write_text(json.dumps(row))
    assert read_plan(file).best.keys == {"layout.dp": 1, "layout.cp": 2, "layout.etp": 1}


def test_a_stale_lock_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        require_fresh(PLAN, {"model": "1", "cluster": "3", "curves": "4"}, Path("a/plan.lock"))
    assert caught.value.exit_code == 4
    assert str(caught.value) == (
        "a/plan.lock is stale: cluster and curves changed since it was written. Plan again: "
        '"equipoise plan --model llama3-8b --cluster h100-sxm:8 --out a".'
    )


def test_other_forms_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.lock"
    file.write_text(json.dumps(PLAN.as_row() | {"version": 7}))
    with pytest.raises(PlanError) as caught:
        read_plan(file)
    assert str(caught.value) == (
        f"{file} is a plan of version 7; this equipoise reads version 3. Plan again with the "
        'words under its "asked".'
    )
    file.write_text('{"model": "llama3-8b"}')
    with pytest.raises(PlanError) as caught:
        read_plan(file)
    assert str(caught.value) == (
        f'{file} has no version field: not a plan.lock. Write one: "equipoise plan --out '
        f'{tmp_path}".'
    )
    row = PLAN.as_row()
    del row["best"]
    file.write_text(json.dumps(row))
    with pytest.raises(PlanError) as caught:
        read_plan(file)
    assert str(caught.value) == (
        f'{file} is not a whole plan.lock (it lacks "best"). Plan again: '
        f'"equipoise plan --out {tmp_path}".'
    )
    file.write_text("{")
    with pytest.raises(PlanError) as caught:
        read_plan(file)
    assert str(caught.value).startswith(f"{file} cannot be read as a plan.lock (it is not JSON at ")
    assert str(caught.value).endswith(f'Write one: "equipoise plan --out {tmp_path}".')


WRONG = {
    "best.price.step_s must be a number": ("best", {"price": PRICE | {"step_s": "x"}}),
    "best.price.terms must be a table": ("best", {"price": PRICE | {"terms": 3}}),
    "best.price.stages.nodes.0 must be a string": (
        "best",
        {"price": PRICE | {"stages": {"nodes": [[1]]}}},
    ),
    'it lacks "layout"': ("best", {"words": {}}),
    "best.words.layout must be a string": ("best", {"words": {"layout": 1}}),
    "listed must be a whole number": ("listed", "x"),
    "read must be a table": ("read", None),
    "asked must be a table": ("asked", -1),
    "a value in it has another type than it must have": ("wall", [3]),
}


@pytest.mark.parametrize("fault", WRONG)
def test_values_of_other_kinds_are_refused(fault: str, tmp_path: Path) -> None:
    key, value = WRONG[fault]
    file, row = tmp_path / "plan.lock", PLAN.as_row()
    row[key] = row[key] | value if isinstance(value, dict) else value
    file.write_text(json.dumps(row))
    with pytest.raises(PlanError) as caught:
        read_plan(file)
    assert str(caught.value) == (
        f'{file} is not a whole plan.lock ({fault}). Plan again: "equipoise plan --out {tmp_path}".'
    )


def test_a_command_can_be_pasted() -> None:
    plan = dataclasses.replace(PLAN, asked={"run.toml": "my runs/run.toml", "ranks": "2"})
    assert plan.command == "equipoise plan 'my runs/run.toml' --ranks 2"
