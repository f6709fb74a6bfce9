"""The journal of trials: only appended, goes on after a kill, refuses another search's."""

import json
from pathlib import Path

import pytest

from equipoise.base.errors import PlanError, SpecError
from equipoise.plan.measured.next import Trial
from equipoise.plan.measured.trials import TrialJournal


def test_what_ended_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "made" / "trials.jsonl"
    journal = TrialJournal(file, "abc")
    ended = (Trial(4, 1.5, wall_s=9.0), Trial(2, None, "killed", "Rank 1 was.", 3.0))
    for trial in ended:
        journal.begin(trial.choice)
        journal.end(trial)
    assert journal.trials == ended == TrialJournal(file, "abc").trials
    before = file.read_text()
    TrialJournal(file, "abc").begin(7)
    assert file.read_text().startswith(before)
    assert json.loads(before.splitlines()[0]) == {"digest": "abc"}


def test_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    TrialJournal(file, "abc").end(Trial(1, 2.0, wall_s=1.0))
    with file.open("a") as opened:
        opened.write('{"choice": 3, "ste')
    journal = TrialJournal(file, "abc")
    journal.end(Trial(5, 1.0, wall_s=1.0))
    assert [trial.choice for trial in TrialJournal(file, "abc").trials] == [1, 5]


def test_a_trial_that_ends_the_search_is_not_tried_for_ever(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    TrialJournal(file, "abc").begin(3)
    journal = TrialJournal(file, "abc")
    assert journal.trials == ()
    journal.begin(3)
    text = "Begun 2 times, and the search ended with it each time."
    assert TrialJournal(file, "abc").trials == (Trial(3, None, "lost", text),)


def test_what_the_user_stopped_was_not_tried(tmp_path: Path) -> None:
    journal = TrialJournal(tmp_path / "trials.jsonl", "abc")
    for _ in range(3):
        journal.begin(3)
        journal.stop(3)
    assert journal.trials == ()


def test_messages(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    TrialJournal(file, "abc")
    with pytest.raises(PlanError) as caught:
        TrialJournal(file, "abd")
    assert str(caught.value) == (
        f"{file} holds trials of another run, machine or version of equipoise, whose seconds do "
        f"not compare. Choose another folder with --out, or remove this one."
    )
    with pytest.raises(SpecError) as caught:
        TrialJournal(file / "deeper" / "trials.jsonl", "abc")
    assert str(caught.value) == (
        f"{file}/deeper/trials.jsonl cannot be read or written (Not a directory). Choose another "
        f"folder with --out."
    )
    journal = TrialJournal(tmp_path / "gone" / "trials.jsonl", "abc")
    journal.file.unlink()
    journal.file.parent.rmdir()
    with pytest.raises(SpecError) as caught:
        journal.begin(0)
    assert str(caught.value) == (
        f"{tmp_path}/gone/trials.jsonl cannot be written (No such file or directory). Choose "
        f"another folder with --out."
    )
