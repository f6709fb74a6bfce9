"""What ``equipoise drill --bit-flips`` refuses before anything is read."""

from pathlib import Path

import pytest

from equipoise.cli.main import main

FLAGS = [
    (["--flips", "3"], "--flips and --each-bit need --bit-flips. Give it too, or leave them out."),
    (["--each-bit"], "--flips and --each-bit need --bit-flips. Give it too, or leave them out."),
    *(
        (
            ["--bit-flips", *flag],
            "--only, --repeat, --minutes and --out are for faults that are rehearsed. Leave them "
            "out beside --bit-flips; --flips N says how many bits are flipped.",
        )
        for flag in (["--only", "kill"], ["--repeat", "2"], ["--minutes", "3"], ["--out", "x"])
    ),
    (["--bit-flips", "--flips", "0"], "flips must be at least 1; it is 0."),
    (["--bit-flips", "--seed", "-1"], "seed must be between 0 and 2**63 - 1; it is -1."),
    (
        ["--bit-flips", "--name", "never"],
        "runs/never does not exist: bits are flipped in a trained model. Train it first with "
        "equipoise train, or give the run's folder instead of run.toml.",
    ),
    (
        ["here", "--bit-flips", "--name", "never"],
        "here is a run's folder, so it takes no other keys. Leave them out.",
    ),
    (
        ["here", "--bit-flips"],
        "here holds no readable resolved.json: it is not the folder of a run of this version. "
        "Start it with `equipoise train run.toml`.",
    ),
]


@pytest.mark.parametrize(("flags", "message"), FLAGS, ids=lambda each: " ".join(each)[:40])
def test_what_cannot_be_asked_is_said_in_a_sentence(
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    assert main(["drill", *flags]) == 2
    assert " ".join(capsys.readouterr().err.split()).endswith(message)
