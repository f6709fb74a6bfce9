"""What cannot be measured, or kept, is said before ranks start."""

from pathlib import Path

import pytest

from equipoise.cli.main import main
from support.recsys.clicks import write_clicks


def test_refusals_come_before_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_toml, file = write_clicks(tmp_path), tmp_path / "file"
    file.write_text("")

    def said(*flags: object) -> str:
        assert main(["calibrate", str(run_toml), *map(str, flags)]) == 2
        return capsys.readouterr().err

    assert said("--out", file / "rates.json") == (
        f"The rates cannot be written to {file / 'rates.json'} (Not a directory). Give another "
        "file with --out.\n"
    )
    assert said("--out", tmp_path) == f"--out {tmp_path} is a folder. Give a file in it.\n"
    hosts = ["--model.towers", '[["user", "ad", "words"]]', "--layout.dp", 1]
    assert said("--out", tmp_path / "rates.json", *hosts, "--layout.ranks_per_host", 1) == (
        "1 towers do not divide over 2 hosts. Give a multiple of 2.\n"
    )
