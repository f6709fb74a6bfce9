"""``equipoise explain tables``: a plan beside others, as tables, JSON and a picture."""

import json
from pathlib import Path

import pytest

from equipoise.cli.main import main


def test_a_plan_stands_beside_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "tables", "--ranks", "16", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["tables"]) == 26
    assert len(answer["ranks"]) == 16
    assert answer["skew"] < min(each["skew"] for each in answer["beside"])
    assert answer["slowest_s"] >= answer["bound_s"]


def test_tables_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tables.png"
    assert main(["explain", "tables", "criteo-kaggle", "--ranks", "2", "--plot", str(file)]) == 0
    text = capsys.readouterr().out
    assert "criteo-kaggle on 2 ranks: slowest rank" in text
    assert "by storage (torchrec's greedy): max/mean" in text
    assert file.stat().st_size > 1000
    assert main(["explain", "tables", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("slowest rank ")


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--optimizer", "lamb"], 2, '--optimizer: "lamb" is not one of sgd, adagrad, '),
        (
            ["--capacity", "0"],
            2,
            "--capacity 0 must be more than 0 and at most 1,000,000,000.",
        ),
        (
            ["--capacity", "1e300"],
            2,
            "--capacity 1e+300 must be more than 0 and at most 1,000,000,000.",
        ),
        (
            ["--link", "nan"],
            2,
            "--link nan must be more than 0 and at most 1,000,000,000.",
        ),
        (["--ranks", "0"], 2, "--ranks 0 is below 1. Give 1 or more."),
        (["--capacity", "1"], 3, "Table cat_0 needs 19.2 GiB with row-wise-adagrad's state"),
        (["--kinds", "tables"], 2, "tables: no such kind of sharding. Choose from table, row"),
    ],
)
def test_wrong_flags_are_refused(
    flags: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "tables", *flags]) == code
    assert capsys.readouterr().err.startswith(message)
