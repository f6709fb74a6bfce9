"""What ``equipoise train`` leaves to its ranks: torch, which takes seconds and 250 MiB."""

import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.cli.main import main
from support.make_run import write_run

PREPARE = """
import sys
from equipoise.cli.main import main
assert main(sys.argv[1:]) == 0
assert "torch" not in sys.modules
"""


def test_a_run_is_prepared_without_torch(texts: Path, cache: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, texts, cache, layout="dp = 2")
    words = ["train", str(path), "--out", str(tmp_path / "run"), "--prepare", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_where_torch_is_missing_nothing_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["train", "--out", str(tmp_path / "run"), "--prepare"]) == 1
    assert capsys.readouterr().err == (
        'This needs torch, which is not installed. Install it: pip install "equipoise[train]"\n'
    )
    assert not (tmp_path / "run").exists()
