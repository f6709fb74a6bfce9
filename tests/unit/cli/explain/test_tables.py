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


def test_towers_halve_what_crosses_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["explain", "tables", "--ranks", "16", "--towers", "2"]
    crossed = []
    for more in ([], ["--tower-width", "64"]):
        assert main([*flags, *more, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        crossed.append(answer["across_bytes"])
        for table in answer["tables"]:
            host = next(t["host"] for t in answer["towers"] if table["name"] in t["tables"])
            assert {rank // 8 for rank in table["ranks"]} == {host}
        assert answer["slowest_s"] >= answer["bound_s"]
    # 26 rows of 128 floats, from their host to the 8 ranks of the other and back, 2,048 samples.
    assert crossed == [2 * 26 * 512 * 8 * 2048, 26 * 512 * 8 * 2048]
    assert main([*flags, "--tower-width", "64"]) == 0
    text = capsys.readouterr().out
    assert (
        "208.0 MiB of rows and gradients cross 2 hosts a step; without what towers cut, 416.0 MiB. "
        "Tables of towers: 11 on host 0, 15 on host 1." in text
    )


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
        (["--tower-width", "8"], 2, "--tower-width needs --towers. Give both or neither."),
        (
            ["--towers", "27"],
            2,
            "26 features cannot fill 27 towers, each with one at least. Give from 1 to 26 towers.",
        ),
        (
            ["--ranks", "16", "--towers", "3"],
            2,
            "3 towers do not divide over 2 hosts. Give a multiple of 2.",
        ),
        (
            ["--towers", "1", "--tower-width", "129"],
            2,
            "Towers cut rows of 128 floats to 129, which is more. Give at most 128.",
        ),
        (
            ["synthetic:9", "--towers", "1"],
            2,
            "Towers condense vectors of one width, and the tables have 32, 64, 128. Choose tables "
            "of one width.",
        ),
        (["--kinds", "tables"], 2, '"tables": no such kind of sharding. Choose from table, row'),
        (["--kinds", ""], 2, '"": no such kind of sharding. Choose from table, row'),
    ],
)
def test_wrong_flags_are_refused(
    flags: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "tables", *flags]) == code
    assert capsys.readouterr().err.startswith(message)
