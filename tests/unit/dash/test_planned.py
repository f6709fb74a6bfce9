"""The plan beside the run, in numbers and in words."""

import dataclasses
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from equipoise.dash.figures import page_data
from equipoise.dash.planned import read_planned
from equipoise.observe.reader import read_run
from equipoise.spec.plan import LOCK, Candidate, Plan
from support.planned_price import PRICE

TERMS = {"products": 0.3, "attention": 0.1, "optimizer": 0.02, "data traffic": 0.08}
PLAN = Plan(
    asked={"run.toml": "run.toml", "ranks": "2"},
    best=Candidate(
        {"layout": "dp=2,zero=1"},
        PRICE | {"step_s": 0.5, "terms": TERMS},
        {},
        {"layout.dp": 2, "layout.zero": 1},
    ),
    runners_up=(),
    bound_s=0.5,
    gap=0.0,
    listed=1,
    priced=1,
    wall=(),
    flip=None,
    nodes=(),
    read={},
    sources={},
)


def obeyed(folder: Path) -> Path:
    """A run whose journal says that it obeyed the plan that lies beside it."""
    file = folder / "journal" / "rank-00000.jsonl"
    said, says = '"layout.zero": "default"', f'"layout.zero": "{LOCK}"'
    file.write_text(file.read_text().replace(said, says))
    PLAN.write(folder / LOCK)
    return folder


@pytest.fixture
def planned_run(journals: ModuleType, tmp_path: Path) -> Path:
    folder = journals.write_run(tmp_path / "planned")
    file = folder / "journal" / "rank-00000.jsonl"
    file.write_text(
        file.read_text().replace('"layout.zero": "default"', f'"layout.zero": "{LOCK}"')
    )
    PLAN.write(folder / LOCK)
    return folder


def test_the_interval_of_a_plan_stands_beside_the_measured_step(
    planned_run: Path,
) -> None:
    assert read_planned(read_run(planned_run)).interval_s is None
    sure = {"interval": {"share": 0.8, "low_s": 0.44, "high_s": 0.56}, "spreads": []}
    best = dataclasses.replace(PLAN.best, price=PLAN.best.price | sure)
    dataclasses.replace(PLAN, best=best).write(planned_run / LOCK)
    data = page_data([read_run(planned_run)])
    assert data["runs"][0]["plan"]["interval_s"] == [0.44, 0.56]
    assert "(80% of such steps: 440.0 ms to 560.0 ms), and" in data["findings"]["plan"]


def test_parts_add_up_on_both_sides(planned_run: Path) -> None:
    record = read_run(planned_run)
    found = read_planned(record)
    assert found is not None
    assert found.steps == 39
    assert found.step_s.measured == np.median(record.step_s[1:])
    assert [each.name for each in found.parts] == [
        "computing",
        "optimizer",
        "messages and waiting",
    ]
    assert [each.planned for each in found.parts] == pytest.approx([0.4, 0.02, 0.08])
    assert found.parts[0].measured == np.median(record.busy_s[1:].max(axis=1))
    assert found.parts[1].measured == pytest.approx(0.02)
    measured = sum(each.measured for each in found.parts)
    assert measured == pytest.approx(found.step_s.measured, rel=0.02)
    assert found.memory_bytes.planned == 0.75 * 2**30
    assert found.memory_bytes.measured == record.peak_memory_bytes.max()


def test_encoders_are_a_part_of_their_own(planned_run: Path) -> None:
    terms = TERMS | {"products": 0.2, "encoders": 0.07, "encoder traffic": 0.03}
    best = dataclasses.replace(PLAN.best, price=PLAN.best.price | {"terms": terms})
    dataclasses.replace(PLAN, best=best).write(planned_run / LOCK)
    file = planned_run / "journal" / "rank-00000.jsonl"
    encoded = [
        {"work": [3, 1], "work_in_turn": [2, 2], "encode_s": [0.01 * step, 0.001], "items": 2}
        for step in range(1, 41)
    ]
    said = [
        json.dumps({"v": 1, "kind": "scalar", "name": "encoders", "step": step} | each)
        for step, each in enumerate(encoded, start=1)
        if step != 20  # a step without items
    ]
    file.write_text(file.read_text() + "".join(f"{line}\n" for line in said))
    record = read_run(planned_run)
    found = read_planned(record)
    assert found is not None
    named = {each.name: each for each in found.parts}
    assert [*named] == ["computing", "encoders", "optimizer", "messages and waiting"]
    assert [each.planned for each in found.parts] == pytest.approx([0.3, 0.07, 0.02, 0.11])
    seconds = [0.0 if step == 20 else 0.01 * step for step in range(2, 41)]
    assert named["encoders"].measured == pytest.approx(np.median(seconds))
    waiting = record.step_s[1:] - record.busy_s[1:].max(axis=1) - np.array(seconds) - 0.02
    assert named["messages and waiting"].measured == pytest.approx(np.median(waiting), abs=1e-3)


def test_the_page_has_it_in_numbers_and_in_words(planned_run: Path) -> None:
    data = page_data([read_run(planned_run)])
    (run,) = data["runs"]
    assert run["plan"]["keys"] == {"layout.dp": 2, "layout.zero": 1}
    assert json.loads(json.dumps(run["plan"], allow_nan=False)) == run["plan"]
    found = read_planned(read_run(planned_run))
    assert found is not None
    step, memory = found.step_s, found.memory_bytes
    assert data["findings"]["plan"] == (
        f"A step was planned to take 500.0 ms, and the median of 39 takes "
        f"{step.measured * 1e3:.1f} ms (plan {step.error:+.1%}); the fullest rank was planned to "
        f"hold 768.0 MiB and holds {memory.measured / 2**20:.1f} MiB (plan {memory.error:+.1%})."
    ).replace("(plan -", "(plan −")


def test_a_run_that_obeyed_none_has_none(planned_run: Path, runs: dict[str, Path]) -> None:
    assert read_planned(read_run(runs["by-work"])) is None
    file = planned_run / "journal" / "rank-00000.jsonl"
    file.write_text(file.read_text().replace(f'"{LOCK}"', '"default"'))
    data = page_data([read_run(planned_run)])
    assert data["runs"][0]["plan"] is None and "plan" not in data["findings"]


def test_a_plan_of_another_version_is_a_note(planned_run: Path) -> None:
    file = planned_run / LOCK
    file.write_text(json.dumps(PLAN.as_row() | {"version": 1}))
    data = page_data([read_run(planned_run)])
    assert data["runs"][0]["plan"] is None
    assert data["notes"] == [
        {
            "kind": "fault",
            "text": f"by-work: {file} is a plan of version 1; this equipoise reads version 3. "
            'Plan again with the words under its "asked".',
        }
    ]


def test_a_run_without_steps_has_the_planned_side(journals: ModuleType, tmp_path: Path) -> None:
    folder = journals.write_run(tmp_path / "unborn", steps=0, stop=False)
    file = folder / "journal" / "rank-00000.jsonl"
    file.write_text(
        file.read_text().replace('"layout.zero": "default"', f'"layout.zero": "{LOCK}"')
    )
    PLAN.write(folder / LOCK)
    data = page_data([read_run(folder)])
    assert data["findings"]["plan"] == (
        "A step was planned to take 500.0 ms; none has been measured yet."
    )
    assert data["runs"][0]["plan"]["step_s"]["measured"] is None
