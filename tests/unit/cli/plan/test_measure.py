"""equipoise plan run.toml --measure, with trials that end as they are told: what is shown, what is
refused, and that the search goes on after each kind of failure."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from equipoise.cli.main import main
from equipoise.launch import trial as launch_trial
from equipoise.launch.trial import TrialEnd
from equipoise.plan.measured.request import STEPS, say_keys
from equipoise.spec.plan import read_plan
from equipoise.spec.run.resolved import read_resolved
from support.verbs import plan

KEYS = "--layout.dp 2 --layout.cp 1 --layout.tp 1 --layout.pp 1 --layout.zero 1"


@pytest.fixture
def run_toml(texts: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))  # some tests write a device file
    monkeypatch.setattr("equipoise.plan.run.own_ranks", lambda: 2)
    path = tmp_path / "run.toml"
    path.write_text(f"""
[data]
source = "text"
path = "{texts}"
vocab = 300
cache = "{cache}"
[model]
layers = 2
hidden = 32
heads = 2
kv_heads = 2
ffn = 48
vocab = 320
[pack]
context_tokens = 2048
step_tokens = 4096
[train]
recompute = "none"
warmup_steps = 2
""")
    return path


class Trials:
    """Stands for real runs: ends by what is asked."""

    def __init__(self, ends: Sequence[TrialEnd]) -> None:
        self.ends, self.asked = list(ends), []

    def __call__(self, arguments: Sequence[str], folder: Path, *, limit_s: float) -> TrialEnd:
        self.asked.append((list(arguments), folder, limit_s))
        return self.ends[len(self.asked) - 1]


def test_failures_are_told_beside_measured_seconds(
    run_toml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = Trials(
        [
            TrialEnd(None, "out of memory", "No memory left.", 3.0),
            TrialEnd(0.5, "", "", 9.0),
            TrialEnd(0.4, "", "", 8.0),
        ]
    )
    monkeypatch.setattr(launch_trial, "run_trial", trials)
    folder = run_toml.parent / "out"
    asked = [run_toml, "--measure", "--out", folder, "--trial-seconds", 30]
    code, out, err = plan(capsys, *asked)
    assert code == 0
    assert "This machine was never measured" in err
    assert err.count("done in") >= 3 and "trial 3 of 3, " in err
    best, count, *_ = out.splitlines()
    assert best.endswith(": 400.0 ms a step, measured.")
    assert count == (
        "3 of the 12 trials that an exhaustive search would take; failed: 1 out of memory."
    )
    assert "out of memory: No memory left." in out and "25.0%" in out
    words, trial, limit_s = trials.asked[2]
    assert (trial.parent, limit_s) == (folder / "trials", 30.0)
    few = f"--train.steps {STEPS} --train.warmup_steps 2 --checkpoint.every_steps {STEPS}"
    assert few in " ".join(words) and "--layout.deadline_s 15.0" in " ".join(words)
    lock = folder / "plan.lock"
    assert out.splitlines()[-1] == (
        f"Wrote {lock}. Train by it: equipoise train {run_toml} --plan {lock}"
    )
    code, out, _ = plan(capsys, *asked, "--json")
    found = json.loads(out)
    assert code == 0 and len(trials.asked) == 3  # nothing was left to try
    assert [each["step_s"] for each in found["trials"]] == [None, 0.5, 0.4]
    assert found["best"]["step_s"] == 0.4 and found["best"]["predicted_s"] > 0
    assert (found["tried"], found["exhaustive"]) == (3, 12)
    assert found["lock"] == str(lock)
    written = read_plan(lock)
    timed = [each for each in found["trials"] if each["step_s"]]
    for candidate, trial in zip((written.best, *written.runners_up), timed[::-1], strict=True):
        assert candidate.price["measured_s"] == trial["step_s"]
        assert sum(candidate.price["terms"].values()) == pytest.approx(trial["predicted_s"])
        assert {name: str(candidate.keys[name]) for name in trial["keys"]} == trial["keys"]
    assert (written.listed, written.priced, written.bound_s, written.flip) == (12, 3, 0.0, None)
    code, out, err = plan(capsys, *asked, "--quiet")
    assert err == "" and len(out.splitlines()) == 2


def test_train_obeys_the_lock_and_explain_tells_it(
    run_toml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies where any plan of the run.toml lies; keys of the command line are said again."""
    monkeypatch.setattr(launch_trial, "run_trial", Trials([TrialEnd(0.5, "", "", 9.0)] * 3))
    monkeypatch.chdir(run_toml.parent)
    code, out, _ = plan(capsys, run_toml, "--measure", "--train.seed", 7)
    lock = run_toml.parent / "plan.lock"
    command = f"equipoise train {run_toml} --train.seed 7 --plan {lock}"
    assert (code, out.splitlines()[-1]) == (0, f"Wrote {lock}. Train by it: {command}")
    words = [*command.split()[1:], "--out", str(run_toml.parent / "run"), "--quiet", "--prepare"]
    assert main(words) == 0
    settled = read_resolved(run_toml.parent / "run")
    for name, value in read_plan(lock).best.keys.items():
        section, key = name.split(".")
        assert getattr(getattr(settled.spec, section), key) == value
    capsys.readouterr()
    assert main(["explain", "plan", str(lock)]) == 0
    said = capsys.readouterr().out
    assert "500.0 ms a step, measured, and planned to take" in said
    assert "12 choices, 3 trained for some steps each." in said
    assert "a gap of" not in said and "no lower bound" not in said
    assert main([*words, "--pack.context_tokens", "1024"]) == 4
    assert capsys.readouterr().err == (
        f'{lock} is stale: packing changed since it was written. Plan again: "equipoise plan '
        f'{run_toml} --ranks 2 --train.seed 7 --measure --out {lock.parent}".\n'
    )


def test_what_no_price_knows_has_no_lock(
    run_toml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_trial, "run_trial", Trials([TrialEnd(0.5, "", "", 9.0)] * 3))
    asked = [run_toml, "--measure", "--out", run_toml.parent / "out", "--pack.policy", "divided"]
    code, out, _ = plan(capsys, *asked)
    assert code == 0 and not (run_toml.parent / "out" / "plan.lock").exists()
    assert out.splitlines()[-1].startswith(
        f"No price knows it, so there is no plan.lock. Train it: equipoise train {run_toml} "
        f"--pack.policy divided --layout.dp 2 "
    )
    code, out, _ = plan(capsys, *asked, "--json")
    assert code == 0 and json.loads(out)["lock"] is None


def test_a_stop_is_not_a_failure(
    run_toml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> TrialEnd:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch_trial, "run_trial", stop)
    folder = run_toml.parent / "out"
    code, _, err = plan(capsys, run_toml, "--measure", "--out", folder)
    assert code == 130 and "stopped at 0% after" in err
    rows = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert [set(row) for row in rows] == [{"digest"}, {"begin"}, {"stopped"}]


def test_all_trials_fail(
    run_toml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = TrialEnd(None, "killed", "Rank 1 of 2 (pid 7) was ended by SIGKILL.", 1.0)
    monkeypatch.setattr(launch_trial, "run_trial", Trials([end] * 3))
    folder = run_toml.parent / "out"
    code, _, err = plan(capsys, run_toml, "--measure", "--out", folder, "--quiet")
    assert code == 6
    first = json.loads((folder / "trials.jsonl").read_text().splitlines()[1])["begin"]
    assert isinstance(first, int)
    sentence, _, rest = err.partition(", ")
    assert sentence == "None of 3 trials trained to its end; the first"
    assert rest.endswith(
        f": killed: Rank 1 of 2 (pid 7) was ended by SIGKILL. All of them are in "
        f"{folder}/trials.jsonl.\n"
    )


def test_messages(run_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {
        (): (
            "--measure trains a run.toml, and none is given. Write one: equipoise init; then "
            "equipoise plan run.toml --measure.\n"
        ),
        (run_toml, "--export", "megatron"): (
            "--export belongs to a search by prices; --measure times runs of train and ends after "
            "a quarter of all trials. Leave --export out.\n"
        ),
        (run_toml, "--seconds", 30): (
            "--seconds belongs to a search by prices; --measure times runs of train and ends after "
            "a quarter of all trials. Leave --seconds out.\n"
        ),
        (run_toml, "--trial-seconds", 0): "--trial-seconds is 0. Give a time above 0.\n",
        (run_toml, "--ranks", 3): (
            "--measure trains one rank a core: ranks must be 1 to 2 on this machine, not 3.\n"
        ),
        (run_toml, "--lengths", "prolong"): (
            f"{run_toml} is planned by its own keys on this machine, and --lengths describes a "
            f"model on a cluster. Give keys instead, as in --layout.tp 2.\n"
        ),
    }
    for words, text in told.items():
        assert plan(capsys, *words, "--measure") == (2, "", text)
    assert plan(capsys, run_toml, "--trial-seconds", 9) == (
        2,
        "",
        "--trial-seconds needs --measure. Give both or neither.\n",
    )


def test_say() -> None:
    keys = {"layout.dp": "1", "layout.pp": "2", "layout.zero": "1", "train.recompute": "full"}
    assert say_keys(keys) == "pp=2 zero=1 recompute=full"
