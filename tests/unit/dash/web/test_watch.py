import json
import os
import shutil
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from equipoise.base.errors import DataError, SpecError
from equipoise.dash.web.find import find_runs, require_place_of_runs
from equipoise.dash.web.watch import Watch


def rows(watch: Watch) -> dict[str, dict[str, Any]]:
    """Cards by label, when all is read."""
    deadline = time.monotonic() + 240
    while (answer := json.loads(watch.list_runs()))["is_behind"]:
        assert time.monotonic() < deadline
    return {row["label"]: row for row in answer["runs"]}


def wait_for(watch: Watch, label: str, step: int) -> dict[str, Any]:
    deadline = time.monotonic() + 240
    while rows(watch).get(label, {"step": -1})["step"] != step:
        assert time.monotonic() < deadline, rows(watch)
        time.sleep(0.05)
    return rows(watch).get(label, {})


@pytest.mark.long
def test_runs_appear_grow_and_vanish(journals: ModuleType, tmp_path: Path) -> None:
    watch = Watch([tmp_path / "runs"])
    assert rows(watch) == {}
    journals.write_run(tmp_path / "runs/plain", steps=20)
    journals.write_run(tmp_path / "runs/both/in-order", steps=10, policy="in-order")
    row = wait_for(watch, "plain", 20)
    assert row["state"] == "finished" and set(rows(watch)) == {"plain", "both/in-order"}
    with (tmp_path / "runs/plain/journal/rank-00000.jsonl").open("a") as file:
        line = {"v": 1, "kind": "scalar", "name": "step", "step": 21, "rank": 0, "t": 0.0}
        file.write(json.dumps(line) + "\n")
    assert wait_for(watch, "plain", 21)["id"] == row["id"]
    shutil.rmtree(tmp_path / "runs/plain")
    wait_for(watch, "plain", -1)
    assert watch.show([row["id"]]) is None


def test_a_page_holds_what_the_report_holds_and_what_is_live(runs: dict[str, Path]) -> None:
    watch = Watch([runs["in-order"], runs["by-work"]])
    listed = rows(watch)
    ids = [listed[name]["id"] for name in ("in-order", "by-work")]
    page = json.loads(watch.show(ids) or b"")
    assert [row["label"] for row in page["live"]] == ["in-order", "by-work"]
    assert "less time per step than in-order (predicted " in page["data"]["headline"]
    run = page["data"]["runs"][1]
    assert [step["step"] for step in run["timeline"]["steps"]] == list(range(29, 41))
    assert len(run["lines"]["loss"]["y"]) == 40
    assert watch.show(ids) is watch.show(ids)  # nothing new is not computed again


def test_no_request_names_a_file(runs: dict[str, Path]) -> None:
    watch = Watch([runs["by-work"]])
    rows(watch)
    for key in ("", "../by-work", str(runs["by-work"]), "by-work", "0" * 12):
        assert watch.show([key]) is None
    assert watch.show([]) is None


def test_many_finished_runs_are_put_away_and_opened_again(
    journals: ModuleType, tmp_path: Path
) -> None:
    for number in range(15):
        journals.write_run(tmp_path / f"run-{number:02}", steps=3, ranks=1, seed=number)
    watch = Watch([tmp_path])
    listed = rows(watch)
    assert rows(watch) == listed and len(listed) == 15
    for row in listed.values():
        page = json.loads(watch.show([row["id"]]) or b"")
        assert page["data"]["runs"][0]["label"] == row["label"]


def test_runs_of_one_name_are_told_apart(journals: ModuleType, tmp_path: Path) -> None:
    folders = [journals.write_run(tmp_path / each / "run", steps=2) for each in "ab"]
    assert set(rows(Watch(folders))) == {str(folder) for folder in folders}
    assert set(rows(Watch([tmp_path, folders[0]]))) == {"a/run", "b/run"}


def test_a_run_that_has_not_started_is_there(tmp_path: Path) -> None:
    (tmp_path / "run/journal").mkdir(parents=True)
    (tmp_path / "run/journal/rank-00000.jsonl").touch()
    watch = Watch([tmp_path])
    row = rows(watch)["run"]
    assert (row["state"], row["state_sentence"]) == ("running", "Before its first step.")
    page = json.loads(watch.show([row["id"]]) or b"")
    assert page["data"] == {} and page["live"][0]["label"] == "run"


def test_a_damaged_run_does_not_hide_the_others(journals: ModuleType, tmp_path: Path) -> None:
    journals.write_run(tmp_path / "whole", steps=2)
    damaged = journals.write_run(tmp_path / os.fsdecode(b"dam\xffaged"), steps=2, stop=False)
    line = {"v": 99, "kind": "instant", "name": "start", "rank": 0, "t": 0.0}
    with (damaged / "journal/rank-00000.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    listed = rows(Watch([tmp_path]))
    assert {row["state"] for row in listed.values()} == {"finished", "unreadable"}
    row = listed[damaged.name]
    assert "is of journal schema 99" in row["state_sentence"]


def test_what_lies_in_a_run_is_no_run(journals: ModuleType, tmp_path: Path) -> None:
    folder = journals.write_run(tmp_path / "run", steps=2)
    journals.write_run(folder / "checkpoint/inner", steps=2)
    journals.write_run(tmp_path / ".hidden", steps=2)
    journals.write_run(tmp_path / "1/2/3/4", steps=2)
    (tmp_path / "round").symlink_to(tmp_path)
    assert find_runs([tmp_path]) == [folder]


def test_a_folder_that_cannot_be_meant_is_refused(journals: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    journals.write_run(tmp_path / "runs/run", steps=2)
    (tmp_path / "runs/notes.txt").touch()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/resolved.json").touch()
    for folder in ("empty", "runs", "runs/run", "begun", "."):
        require_place_of_runs(tmp_path / folder)
    missing, file, other = (tmp_path / each for each in ("nope", "runs/notes.txt", "other"))
    other.mkdir()
    (other / "a.txt").touch()
    for folder, sentence in (
        (missing, f"No such folder: {missing}. Give the folder of a run, or one in which runs "
         "are."),
        (file, f"{file} is a file. Give the folder of a run, or one in which runs are."),
        (other, f"{other} holds no run but other files, such as a.txt. Give the folder of a run, "
         "or one in which runs are or will be."),
    ):  # fmt: skip
        with pytest.raises((SpecError, DataError)) as caught:
            require_place_of_runs(folder)
        assert str(caught.value) == sentence
