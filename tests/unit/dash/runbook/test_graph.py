"""Guides as the page draws them: rows, lanes, lines, and which guide fits a fault."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from equipoise.cli.main import main
from equipoise.dash.figures import page_data
from equipoise.dash.runbook.graph import in_order, lane_of
from equipoise.observe.reader import read_run
from support.runbooks.written import WrittenRun


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, list[str]]:
    count = draw(st.integers(1, 12))
    parents = {
        f"s{at}": [f"s{each}" for each in draw(st.sets(st.integers(0, at - 1), max_size=3))]
        if at
        else []
        for at in range(count)
    }
    return {name: parents[name] for name in draw(st.permutations(list(parents)))}


@given(parents=graphs())
def test_lines_lead_downwards_and_pass_no_mark(parents: dict[str, list[str]]) -> None:
    ordered = in_order(parents)
    assert sorted(ordered) == sorted(parents)
    row = {name: at for at, name in enumerate(ordered)}
    lanes = lane_of(ordered, parents)
    for name, own in parents.items():
        for before in own:
            assert row[before] < row[name]
            passed = [each for each in ordered if row[before] < row[each] < row[name]]
            assert lanes[before] not in {lanes[each] for each in passed}


def test_steps_that_stand_in_order_stay_so() -> None:
    assert in_order({"a": [], "b": ["a"], "c": []}) == ["a", "b", "c"]
    assert in_order({"b": ["a"], "a": []}) == ["a", "b"]
    assert lane_of(["a", "b", "c"], {"a": [], "b": ["a"], "c": ["a"]}) == {"a": 0, "b": 1, "c": 0}


def paused(folder: Path) -> WrittenRun:
    run = WrittenRun(folder, 2)
    run.start()
    run.steps(3)
    run.wait("instant", "late", 0, [1])
    run.wait("instant", "came", 0, [])
    return run


def test_a_guide_that_was_run_is_drawn_with_its_evidence(tmp_path: Path) -> None:
    paused(tmp_path)
    assert page_data([read_run(tmp_path)])["runbooks"] == []
    assert main(["drill", "--runbook", "hung-collective", str(tmp_path), "--quiet"]) == 0
    data = page_data([read_run(tmp_path)])
    (book,) = data["runbooks"]
    assert book["title"] == "Runbook: A collective hangs"
    steps = {step["name"]: step for step in book["steps"]}
    assert steps["The pause is over"]["conclusion"] == data["findings"]["runbook-0"]
    late = next(each for each in steps["What happened"]["numbers"] if each["name"] == "late")
    assert (late["value"], late["events"]) == ("1", 1)
    assert late["lines"].startswith("journal/rank-00000.jsonl:")
    names = [step["name"] for step in book["steps"]]
    taken = {(names[e["from"]], names[e["to"]]) for e in book["edges"] if e["is_taken"]}
    assert taken == {
        ("What happened", "Who is missing"),
        ("What happened", "The pause is over"),
        ("Who is missing", "The pause is over"),
    }
    (tmp_path / "runbooks" / "hung-collective.json").write_text("{}")
    notes = [note["text"] for note in page_data([read_run(tmp_path)])["notes"]]
    path = tmp_path / "runbooks" / "hung-collective.json"
    assert notes[-1] == (
        f"{path} cannot be read (it is not of version 1). Run its guide again: equipoise drill "
        f"--runbook hung-collective {tmp_path}."
    )


def test_each_fault_names_the_guide_that_fits_it_once(tmp_path: Path) -> None:
    run = paused(tmp_path)
    for _ in range(2):
        run.wait("fault", "error", 0, [1], type="HungError", exit_code=6, traceback="")
    run.write(1, "fault", "killed", message="Rank 1 was ended by SIGKILL.")
    run.write(0, "fault", "error", type="SpecError", message="A key is wrong.", exit_code=2)
    notes = [note["text"] for note in page_data([read_run(tmp_path)])["notes"]]
    assert [note for note in notes if "to find out why" in note] == [
        f"by-work: to find out why, equipoise drill --runbook {name} {tmp_path}"
        for name in ("hung-collective", "rank-lost")
    ]
