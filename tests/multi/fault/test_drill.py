"""``equipoise drill`` on a run of two ranks: real faults, whose row says what became of them."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from equipoise.fault.drill.injection import proven
from support.make_run import share_curve, write_run
from support.read_run import events
from support.verbs import DEADLINE_S, run, wait_until


@pytest.fixture
def run_toml(texts: Path, cache: Path, priced: Path, tmp_path: Path) -> Path:
    share_curve(priced, cache)  # where the undisturbed run of a drill looks for it
    return write_run(tmp_path, texts, cache, steps=500, every_steps=50, layout="dp = 2")


def test_faults_are_named_and_the_state_is_that_of_an_undisturbed_run(
    run_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five starts of two ranks: undisturbed, killed, spoiled, and again after each fault."""
    out, only = tmp_path / "drill", "kill,nan-gradient"
    code, text, err = run(
        capsys, "drill", run_toml, "--only", only, "--json", "--out", out, "--fault.restarts", 3
    )
    assert code == 0, text + err
    done = json.loads(text)
    assert (done["ranks"], done["survived"]) == (2, True)
    assert done["scaled"] == ["train.steps 500 -> 24", "checkpoint.every_steps 50 -> 8"]
    assert [(row["fault"], row["number"], row["survived"]) for row in done["rows"]] == [
        ("kill", "F1", 1),
        ("nan-gradient", "F10", 1),
    ]
    (killed,), (spoiled,) = (row["outcomes"] for row in done["rows"])
    (fired,) = proven(out / "001-kill" / "drill")
    assert killed["injected"] == f"SIGKILL, rank 1 in forward of step {fired.step}"
    assert killed["said"] == (
        f"Rank 1 of 2 (pid {fired.process}) was ended by SIGKILL; it left no traceback. All "
        "ranks start again from the newest whole checkpoint (restart 1 of at most 3)."
    )
    _, resumed = [event["resumed_step"] for event in events(out / "001-kill", "start")]
    assert killed["lost_tokens"] == (fired.step - resumed) * 1024
    assert (killed["detected_by"], killed["goes_on"]) == ("launcher", "by itself")
    assert killed["detected_s"] > 0 and killed["resumed_s"] > 0
    (fired,) = proven(out / "002-spoil-gradient" / "drill")
    assert f"The last weight whose gradient is not finite is {fired.detail}." in spoiled["said"]
    assert (spoiled["detected_by"], spoiled["goes_on"]) == ("step", "same command")


def test_a_fault_that_no_rule_recovers_fails_the_drill_and_leaves_nothing(
    run_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    code, out, _ = run(
        capsys, "drill", run_toml, "--only", "kill", "--quiet", "--fault.restarts", 0
    )
    assert code == 6
    assert "the run did not go on. The run said: Rank 1 of 2 (pid " in out
    assert os.listdir(scratch) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_drill_that_is_interrupted_leaves_no_process_and_no_folder(
    run_toml: Path, tmp_path: Path, number: int
) -> None:
    """Interrupted while the run without faults starts its ranks."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "equipoise.cli.main", "drill", str(run_toml)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )

    def command_lines() -> list[bytes]:
        lines = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                lines.append((entry / "cmdline").read_bytes())
        return [line for line in lines if str(scratch).encode() in line]

    wait_until(lambda: any(b"equipoise.train.worker" in line for line in command_lines()))
    process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err.splitlines()[-1]) == (130, "Interrupted.")
    assert [*scratch.glob("equipoise-*")] == []
    wait_until(lambda: not command_lines())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--only", "kil"],
            '--only: no such fault: "kil". Nearest: kill. All: ',
        ),
        (["--repeat", "0"], "--repeat 0 rehearses nothing. Give 1 or more.\n"),
        (
            ["--repeat", "10001"],
            "--repeat 10,001 is more than 10,000, which take days. Give 10,000 or less.\n",
        ),
        (
            ["--out", "."],
            ". exists, and a drill begins with a new folder. Choose another with --out, or leave "
            "--out out.\n",
        ),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "drill", *flags)
    assert code == 2
    assert err.startswith(said)
