"""What a drill prints and exits with, from outcomes."""

import dataclasses
import json

import pytest

from equipoise.cli.drill.table import print_drill
from equipoise.fault.drill.outcome import Drill, DrillRow, Rehearsal

GOOD = Rehearsal(
    injected="SIGKILL, rank 1 in wait of step 9",
    detected_by="launcher",
    is_named=True,
    detected_s=0.05,
    resumed_s=4.0,
    lost_tokens=2048,
    is_equal=True,
    goes_on="by itself",
    said="Rank 1 was ended by SIGKILL.",
)


def drilled(*outcomes: Rehearsal, **more: object) -> Drill:
    return Drill((DrillRow("kill", "F1", outcomes, **more),), 2, ["train.steps 500 -> 24"], 60.0)


def test_a_fault_that_was_survived(capsys: pytest.CaptureFixture[str]) -> None:
    done = drilled(GOOD)
    assert done.is_survived
    print_drill(done, is_quiet=False)
    out = capsys.readouterr().out
    assert out.endswith(
        "Made smaller: train.steps 500 -> 24.\n"
        "1 of 1 faults on 2 ranks were named and survived with the state of an undisturbed run, in "
        "1 min 0 s.\n"
    )
    for cell in ("launcher", "yes", "50.0 ms", "4.00 s", "2,048"):
        assert cell in out
    assert json.loads(json.dumps(done.as_json()))["rows"][0]["survived"] == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"injected": ""}, "kill: the fault did not fire. Rank 1 was ended by SIGKILL.\n"),
        (
            {"detected_by": "", "is_named": False},
            "kill (SIGKILL, rank 1 in wait of step 9): nothing noticed it. The run said: Rank 1 "
            "was ended by SIGKILL.\n",
        ),
        (
            {"is_named": False},
            "kill (SIGKILL, rank 1 in wait of step 9): it was not named rightly. The run said: ",
        ),
        (
            {"goes_on": "", "is_equal": None},
            "kill (SIGKILL, rank 1 in wait of step 9): the run did not go on. The run said: ",
        ),
        (
            {"is_equal": False},
            "kill (SIGKILL, rank 1 in wait of step 9): the run ended with another state. The run ",
        ),
    ],
)
def test_a_fault_that_was_not(
    changes: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = drilled(GOOD, dataclasses.replace(GOOD, **changes))
    assert not done.is_survived
    print_drill(done, is_quiet=True)
    out = capsys.readouterr().out
    assert said in out
    assert "Made smaller" not in out


def test_a_fault_that_cannot_be_rehearsed_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    done = drilled(left_out="needs 2 ranks, and this run has 1")
    assert done.is_survived
    print_drill(done, is_quiet=False)
    assert "kill was left out: it needs 2 ranks, and this run has 1.\n" in capsys.readouterr().out


def test_several_rehearsals_have_their_median_and_their_worst(
    capsys: pytest.CaptureFixture[str],
) -> None:
    others = [dataclasses.replace(GOOD, detected_s=each) for each in (0.02, 0.9)]
    print_drill(drilled(GOOD, *others), is_quiet=True)
    out = capsys.readouterr().out
    assert "50.0 ms (most 900.0 ms)" in out
    assert "3/3" in out
