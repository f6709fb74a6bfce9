"""``equipoise explain experts --run``: what a run's own routers chose."""

import json
from pathlib import Path

import pytest

from equipoise.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [
        {"kind": "instant", "name": "start", "model": {"expert_ffn": 64}},
        {"kind": "scalar", "name": "experts", "step": 1, "loads": [[90, 10, 10, 10]]},
        {"kind": "scalar", "name": "experts", "step": 2, "loads": [[10, 90, 10, 10]]},
    ]
    journal = tmp_path / "run" / "journal" / "rank-00000.jsonl"
    journal.parent.mkdir(parents=True)
    whole = ({"v": 1, "t": 1.0 + at, "rank": 0, **line} for at, line in enumerate(lines))
    journal.write_text("".join(json.dumps(line) + "\n" for line in whole))
    return tmp_path / "run"


def test_every_policy_is_scored_on_all_steps(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("explain", "experts", "--run", str(folder), "--ranks", "2")
    assert main([*asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    by_name = {each["policy"]: each for each in said["policies"]}
    assert said["steps"] == said["schedules"] == 2
    assert by_name["fixed"]["mean_skew"] == by_name["fixed"]["worst_skew"] == 100 / 60
    assert by_name["exact"]["worst_skew"] < 1.05
    assert main([*asked, "--step", "2"]) == 0
    assert "Loads of run, dealt to 2 ranks, 1 slot for copies: 1 step, " in capsys.readouterr().out
    picture = folder / "loads.svg"
    assert main([*asked, "--plot", str(picture)]) == 0
    assert capsys.readouterr().out.endswith(f"{picture}\n")
    assert picture.read_text().startswith("<?xml")
    assert main([*asked, "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("fixed: max/mean 1.667 on average, 1.667 at worst, ")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--seed", "3", "--workload", "W2"),
            "--run takes the run's own loads; remove --workload, --seed.",
        ),
        (
            ("--step", "9"),
            "Step 9 is not in this run's journal, which has experts' loads of steps 1 to 2.",
        ),
        (("--slots", "-1"), "--slots -1 is below 0. Give 0 or more."),
        (
            ("--slots", "1000000000000"),
            "--slots 1000000000000 is more than the 2 experts that a rank does not own. Give 2 or "
            "less.",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    assert main(["explain", "experts", "--run", str(folder), "--ranks", "2", *more]) == 2
    assert capsys.readouterr().err.strip() == message


def test_experts_without_weights_compute_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = folder / "journal" / "rank-00000.jsonl"
    journal.write_text(journal.read_text().replace('"expert_ffn"', '"experts": 3, "expert_ffn"'))
    assert main(["explain", "experts", "--run", str(folder), "--ranks", "2", "--json"]) == 0
    fixed = json.loads(capsys.readouterr().out)["policies"][0]
    # 90 + 10 beside 10, then 10 + 90 beside 10; the fourth expert's rows are nobody's.
    assert fixed["policy"] == "fixed" and fixed["mean_skew"] == pytest.approx(100 / 55)


def test_a_run_without_experts_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = folder / "journal" / "rank-00000.jsonl"
    journal.write_text(journal.read_text().splitlines(keepends=True)[0])
    assert main(["explain", "experts", "--run", str(folder)]) == 2
    assert capsys.readouterr().err.strip() == (
        f"{folder}: its journal has no loads of experts. Give the folder of a run with "
        f"model.experts that has finished a step."
    )
