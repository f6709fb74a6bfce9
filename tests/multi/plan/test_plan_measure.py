"""``equipoise plan run.toml --measure`` on real ranks: trials that fail do not end the search."""

import json
import os
import shlex
import signal
from pathlib import Path

import pytest

from equipoise.cli.main import main
from equipoise.spec.plan import read_plan
from support.launch.held import Held
from support.make_run import write_run
from support.read_run import events
from support.verbs import run_while, wait_until


@pytest.fixture
def run_toml(texts: Path, cache: Path, tmp_path: Path) -> Path:
    return write_run(
        tmp_path, texts, cache, layers=2, train='recompute = "none"', layout="zero = 1"
    )


def rows(folder: Path) -> list[dict]:
    file = folder / "trials.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def ranks_of(trial: Path) -> list[int]:
    """Processes of a trial's ranks, by their command lines."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            words = (each / "cmdline").read_bytes().decode().split("\0")
        except OSError:  # it has ended
            continue
        if str(trial) in words and "equipoise.train.worker" in words and "-u" in words[:2]:
            found.append(int(each.name))
    return sorted(found)


def kill_a_rank(folder: Path) -> int:
    """Wait for the first trial's steps and kill one of its ranks; the choice that was tried."""
    found = list[tuple[Path, list[int]]]()

    def has_begun() -> bool:
        found[:] = [
            (trial, ranks_of(trial))
            for trial in (folder / "trials").glob("*")
            if list(trial.glob("journal/rank-*.jsonl"))
        ]
        return len(found) == 1 and len(found[0][1]) == 2

    wait_until(has_begun)
    ((trial, pids),) = found
    os.kill(pids[1], signal.SIGKILL)
    return int(trial.name)


def test_a_killed_rank_fails_its_trial_and_not_the_search(
    run_toml: Path, tmp_path: Path, held: type[Held], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "measured"
    orders, killed = held(folder), list[int]()
    orders.hold(2)

    def kill() -> None:
        killed.append(kill_a_rank(folder))
        orders.go_on()

    longer = ["--pack.context_tokens", 2048, "--pack.step_tokens", 4096]  # for context ranks, too
    words = [run_toml, "--measure", "--ranks", 2, "--out", folder, "--json", *longer]
    code = run_while(kill, "plan", *words)
    caught = capsys.readouterr()
    assert code == 0, caught.err
    found = json.loads(caught.out)
    assert (found["tried"], found["exhaustive"]) == (2, 8)
    first, *others = found["trials"]
    assert first["cause"] == "killed" and first["step_s"] is None
    assert first["message"].startswith("Rank ") and "was ended by SIGKILL" in first["message"]
    assert all(each["step_s"] > 0 and each["cause"] == "" for each in others)
    assert found["best"]["step_s"] == min(each["step_s"] for each in others)
    ended = [row for row in rows(folder) if "wall_s" in row]
    assert next(row["choice"] for row in ended) == killed[0]
    assert not list(folder.glob("trials/*/checkpoint"))
    assert not [pid for trial in folder.glob("trials/*") for pid in ranks_of(trial)]


def test_the_same_command_goes_on(
    run_toml: Path, tmp_path: Path, held: type[Held], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "measured"
    orders = held(folder)
    orders.hold(2)
    one = ["--pack.policy", "by-work"]  # leaves three choices, and one trial
    words = [str(run_toml), "--measure", "--ranks", "2", "--out", str(folder), *one]

    def interrupt() -> None:
        wait_until((folder / "trials").exists)
        os.kill(os.getpid(), signal.SIGINT)

    code = run_while(interrupt, "plan", *words)
    orders.go_on()
    err = capsys.readouterr().err
    assert code == 130 and err.endswith("Interrupted.\n"), err
    assert [set(row) for row in rows(folder)] == [{"digest"}, {"begin"}, {"stopped"}]
    assert main(["plan", *words]) == 0
    caught = capsys.readouterr()
    assert "trial 1 of 1, " in caught.err
    assert "1 of the 3 trials that an exhaustive search would take; none failed." in caught.out
    lock = folder / "plan.lock"
    train = ["train", str(run_toml), *one, "--plan", str(lock)]
    command = caught.out.splitlines()[-1]
    assert command == f"Wrote {lock}. Train by it: {shlex.join(['equipoise', *train])}"
    assert main(["plan", *words, "--json"]) == 0  # nothing is left to try: only told
    caught = capsys.readouterr()
    (trial,) = json.loads(caught.out)["trials"]
    assert "trial" not in caught.err
    assert len([row for row in rows(folder) if "begin" in row]) == 2

    plan = read_plan(lock)
    assert plan.best.price["measured_s"] == trial["step_s"]
    assert plan.best.price["step_s"] == trial["predicted_s"]
    ((tried,),) = (events(each, "start") for each in folder.glob("trials/*"))
    stages = plan.best.stages
    split = {} if stages is None else {"edges": [*stages.edges], "ranks": [*stages.ranks]}
    assert tried["stages"] == split
    for name, value in plan.best.keys.items():
        section, key = name.split(".")
        assert tried["spec"][section][key] == value
