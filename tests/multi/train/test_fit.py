"""What cannot fit is refused before a rank starts, by doctor's figures and in its words."""

import re
from pathlib import Path

import pytest

from equipoise.cli.main import main


def test_a_model_that_memory_cannot_hold(
    texts: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model.preset", "llama3-405b", "--layout.dp", "2", "--data.cache", str(cache)]
    words += ["--data.source", "text", "--data.path", str(texts)]
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == 3
    err = capsys.readouterr().err
    assert re.fullmatch(
        r"Memory: [\d.]+ GiB free, [\d.,]+ [GT]iB needed, because 2 ranks are forecast to need "
        r"[\d.,]+ [GT]iB each, most of it \w[\w ]*\. Set train\.recompute = \"full\", a smaller "
        r"pack\.context_tokens, or layout\.zero = 3\.\n",
        err,
    ), err
    assert not (tmp_path / "run").exists()
