"""What a guide said, written and read back, and files that are damaged."""

import json
from pathlib import Path

import pytest

from equipoise.base.errors import FaultError
from equipoise.fault.runbook.guide import Need
from equipoise.fault.runbook.record import read_records, write_record
from equipoise.fault.runbook.run import ActionRun, GuideRun, StepEnd
from equipoise.fault.runbook.source import Evidence

DONE = GuideRun(
    "slow-rank",
    "A rank is slow",
    "runs/a",
    "concluded",
    ("Rank 1 is slow.",),
    (
        StepEnd(
            "Who",
            "done",
            ((Need("Other", "x"),),),
            "slow",
            "",
            "Rank 1 is slow.",
            (Evidence("wait", "wait = 1", {"0": 1.0}, 3, ("journal/rank-00000.jsonl:2",)),),
            ActionRun("equipoise doctor", changes=False, exit_code=0, output="fine"),
            0.5,
        ),
        StepEnd("Other", "skipped", (), "", "why"),
    ),
    1_790_000_000.0,
    0.75,
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = write_record(tmp_path, DONE)
    assert path == tmp_path / "runbooks" / "slow-rank.json"
    runs, faults = read_records(tmp_path)
    assert (runs, faults) == ([DONE], [])
    assert (runs[0].t, runs[0].took_s, runs[0].one_by_one_s) == (DONE.t, 0.75, 0.5)
    assert json.loads(path.read_text())["one_by_one_s"] == 0.5


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is not JSON"),
        ("[]", "it is not of version 1"),
        ('{"v": 2}', "it is not of version 1"),
        ('{"v": 1, "guide": 3}', "its fields are wrong"),
    ],
)
def test_a_damaged_record_is_one_sentence(text: str, why: str, tmp_path: Path) -> None:
    write_record(tmp_path, DONE)
    bad = tmp_path / "runbooks" / "bad.json"
    bad.write_text(text)
    runs, faults = read_records(tmp_path)
    assert runs == [DONE]
    (sentence,) = faults
    assert sentence.startswith(f"{bad} cannot be read (") and sentence.endswith(
        f"). Run its guide again: equipoise drill --runbook bad {tmp_path}."
    )
    assert why in sentence or text == "{"


def test_a_run_without_guides_has_none_and_a_folder_that_refuses_is_named(tmp_path: Path) -> None:
    assert read_records(tmp_path) == ([], [])
    (tmp_path / "runbooks").write_text("")
    with pytest.raises(FaultError) as refusal:
        write_record(tmp_path, DONE)
    assert str(refusal.value) == (
        f"{tmp_path / 'runbooks' / 'slow-rank.json'} cannot be written (Not a directory), so the "
        f"run's report will not show this guide."
    )
