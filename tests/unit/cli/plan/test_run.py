"""equipoise plan run.toml: the run's own keys and corpus, a lock that goes stale, and refusals."""

import dataclasses
import json
from pathlib import Path

import pytest

from equipoise.base.errors import PlanError, SpecError
from equipoise.cli.main import main
from equipoise.observe.machine import usable_cores
from equipoise.plan.run import read_obeyed
from equipoise.spec.device.file import write_device_file
from equipoise.spec.device.here import cpu_model, device_file
from equipoise.spec.plan import read_plan
from equipoise.spec.run.load import read_run
from support.device_files import A_FILE
from support.timed_parts import parts
from support.verbs import plan, run

CORES = len(usable_cores())


@pytest.fixture
def run_toml(texts: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small run, in a home of its own: some tests write a device file."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = tmp_path / "run.toml"
    file.write_text(
        f'name = "small"\n[data]\nsource = "text"\npath = "{texts}"\nvocab = 300\n'
        f'cache = "{cache}"\n[model]\nlayers = 2\nhidden = 32\nheads = 2\nkv_heads = 1\nffn = 48\n'
        f"vocab = 320\nhead_width = 16\n[pack]\ncontext_tokens = 256\nstep_tokens = 1024\n"
    )
    return file


def test_a_lock_is_written_beside_the_run(
    capsys: pytest.CaptureFixture[str], run_toml: Path
) -> None:
    code, out, err = plan(capsys, run_toml, "--ranks", 1)
    assert code == 0
    lock = run_toml.parent / "plan.lock"
    assert out.endswith(f"Wrote {lock}. Train by it: equipoise train {run_toml} --plan {lock}\n")
    found = read_plan(lock)
    assert found.command == f"equipoise plan {run_toml} --ranks 1"
    assert found.best.keys["layout.dp"] == 1 and found.best.keys["layout.cp"] == 1
    policy = found.best.keys["pack.policy"]
    assert f'In run.toml: pack.policy = "{policy}", train.recompute' in out
    home = run_toml.parent / "home"
    assert (
        f"This machine was never measured ({home}/.cache/equipoise/this-cpu.json is not there), "
        'so seconds are guesses. "equipoise calibrate" takes a minute; then plan again.\n'
    ) in err
    assert main(["explain", "plan", str(lock), "--json"]) == 0
    written = json.loads(lock.read_text())
    assert written == json.loads(capsys.readouterr().out) | {"digest": written["digest"]}


def test_launch_and_doctor_obey_a_lock(capsys: pytest.CaptureFixture[str], run_toml: Path) -> None:
    assert plan(capsys, run_toml, "--ranks", 1)[0] == 0
    lock = run_toml.parent / "plan.lock"
    assert main(["launch", str(run_toml), "--plan", str(lock)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/bin/bash\n# run small, 1 rank on one node. Start it on the node.\n")
    assert f" train {run_toml} --plan {lock} --layout.dp=1 --out " in out
    assert main(["doctor", str(run_toml), "--plan", str(lock), "--json"]) in (0, 5)
    capsys.readouterr()
    other = "--train.recompute=none" if _recompute(lock) == "full" else "--train.recompute=full"
    assert main(["launch", str(run_toml), "--plan", str(lock), other]) == 2
    assert "contradicts the plan" in capsys.readouterr().err


def _recompute(lock: Path) -> str:
    return str(read_plan(lock).best.keys["train.recompute"])


def test_what_was_timed_is_what_is_compared(
    capsys: pytest.CaptureFixture[str], run_toml: Path
) -> None:
    here = dataclasses.replace(A_FILE, machine=cpu_model())
    device_file().parent.mkdir(parents=True)
    write_device_file(device_file(), here)
    ranks = min(2, CORES)
    flags = ["--ranks", ranks, "--train.recompute", "none"]
    code, out, err = plan(capsys, run_toml, *flags, "--json")
    assert code == 0
    assert (
        "The parts of this run's steps were never timed here, so they are priced from kernels "
        f"alone, which miss the host's time. \"equipoise calibrate {run_toml} --train.recompute "
        'none" times them; then plan again.\n'
    ) in err
    listed = json.loads(out)["listed"]
    code, _, err = plan(capsys, run_toml, *flags, "--model.experts", 4, "--json")
    assert code == 0
    assert (
        "Steps of models with experts are priced from kernels alone, which miss the host's time: "
        "nothing times their parts.\n"
    ) in err
    timed = dataclasses.replace(here, parts=(parts(read_run(run_toml).model),))
    write_device_file(device_file(), timed)
    code, out, err = plan(capsys, run_toml, *flags, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["best"]["price"]["terms"]["host"] == pytest.approx(5e-3)
    left = listed - found["listed"]
    told = (
        f"{left:,} of {listed:,} choices mix ways of sharing a step, which nobody timed here; they "
        "are left out.\n"
    )
    assert (told in err) == (left > 0)
    assert all("host" in each["price"]["terms"] for each in found["runners_up"])


def test_terms_and_memory_add_up(capsys: pytest.CaptureFixture[str], run_toml: Path) -> None:
    code, out, _ = plan(capsys, run_toml, "--ranks", 1, "--json")
    assert code == 0
    found = json.loads(out)
    for each in (found["best"], *found["runners_up"]):
        price = each["price"]
        assert sum(price["terms"].values()) == pytest.approx(price["step_s"])
        assert sum(price["memory"].values()) == pytest.approx(price["memory_gib_max"])
        assert price["fits"] and price["step_s"] >= found["best"]["price"]["step_s"]
    assert found["best"]["words"]["policy"] in ("by-work", "by-tokens")


def test_what_the_run_gives_is_not_searched(
    capsys: pytest.CaptureFixture[str], run_toml: Path, tmp_path: Path
) -> None:
    flags = ["--train.recompute", "full", "--pack.policy", "in-order", "--out", tmp_path / "kept"]
    assert plan(capsys, run_toml, "--ranks", 1, *flags, "--quiet")[0] == 0
    found = read_plan(tmp_path / "kept" / "plan.lock")
    for each in (found.best, *found.runners_up):
        assert each.keys["train.recompute"] == "full" and each.keys["pack.policy"] == "in-order"
    assert found.command == (
        f"equipoise plan {run_toml} --ranks 1 --train.recompute full --pack.policy in-order"
    )
    assert (tmp_path / "kept" / "search.jsonl").exists()


def test_a_run_obeys_a_fresh_lock_and_refuses_a_stale_one(
    capsys: pytest.CaptureFixture[str], run_toml: Path
) -> None:
    assert plan(capsys, run_toml, "--ranks", 1, "--quiet")[0] == 0
    lock = run_toml.parent / "plan.lock"
    kept, run = read_obeyed(lock, read_run(run_toml))
    assert kept == read_plan(lock)
    assert run.spec.layout.count_ranks(cores=64) == 1
    assert run.origins["layout.zero"] == "plan.lock"
    changed = read_run(run_toml, [("model.layers", "3"), ("train.precision", "bf16")])
    with pytest.raises(PlanError) as caught:
        read_obeyed(lock, changed)
    assert caught.value.exit_code == 4
    assert str(caught.value) == (
        f"{lock} is stale: model and precision changed since it was written. Plan again: "
        f'"equipoise plan {run_toml} --ranks 1 --out {lock.parent}".'
    )
    with pytest.raises(SpecError) as refused:
        read_obeyed(lock, read_run(run_toml, [("layout.dp", "2")]))
    assert str(refused.value) == (
        "layout.dp = 2 (--layout.dp) contradicts the plan, which says 1. Omit it, or plan "
        f'with it: "equipoise plan {run_toml} --ranks 1".'
    )
    text = run_toml.read_text()
    run_toml.write_text(text.replace("step_tokens = 1024", "step_tokens = 2048"))
    assert main(["train", str(run_toml), "--plan", str(lock)]) == 4
    assert capsys.readouterr().err.startswith(f"{lock} is stale: packing changed since it was ")


def test_train_obeys_no_plan_of_a_cluster(
    capsys: pytest.CaptureFixture[str], run_toml: Path, tmp_path: Path
) -> None:
    words = ["--model", "layers=2,hidden=64,heads=2,vocab=100", "--cluster", "h100-sxm:1"]
    words += ["--context-tokens", "512", "--step-sequences", "1", "--recompute", "none"]
    assert plan(capsys, *words, "--out", tmp_path, "--quiet")[0] == 0
    assert run(capsys, "train", run_toml, "--plan", tmp_path / "plan.lock") == (
        4,
        "",
        f"{tmp_path}/plan.lock plans layers=2,hidden=64,heads=2,vocab=100 on h100-sxm:1, and train "
        "obeys plans of a run.toml on this machine. Make one: equipoise plan run.toml.\n",
    )


def test_train_obeys_no_layers_of_their_own(
    capsys: pytest.CaptureFixture[str], run_toml: Path
) -> None:
    assert plan(capsys, run_toml, "--ranks", 1)[0] == 0
    lock = run_toml.parent / "plan.lock"
    found = read_plan(lock)
    runs = "1:dp=1,zero=1:full 1:dp=1,zero=1:none"
    best = dataclasses.replace(found.best, words=found.best.words | {"layers": runs})
    dataclasses.replace(found, best=best).write(lock)
    assert run(capsys, "train", run_toml, "--plan", lock) == (
        4,
        "",
        f"{lock} gives layers strategies of their own ({runs}), and train runs one for all. Plan "
        "without --layers own: equipoise plan run.toml.\n",
    )


def test_layers_of_their_own_are_not_compared_with_timed_parts(
    capsys: pytest.CaptureFixture[str], run_toml: Path
) -> None:
    timed = dataclasses.replace(A_FILE, machine=cpu_model(), parts=(parts(),))
    device_file().parent.mkdir(parents=True)
    write_device_file(device_file(), timed)
    step = ["--model", "2m", "--cluster", "this-cpu:2", "--context-tokens", "512"]
    step += ["--step-sequences", "4", "--precision", "fp32"]
    own = "4:dp=2:none"
    told = (
        "layers are priced one by one from kernels alone, while steps of this model on this-cpu:2 "
        "are priced from timed parts, which include the host's time; the two cannot be compared. "
        "Leave layers out.\n"
    )
    assert plan(capsys, *step, "--layers", "own") == (2, "", told)
    assert main(["simulate", *step, "--layout", "dp=2", "--layers", own]) == 2
    assert capsys.readouterr().err == told
    narrow = [*step[:-1], "bf16", "--layout", "dp=2", "--layers", own, "--quiet"]
    assert main(["simulate", *narrow]) == 0


def test_what_cannot_be_planned(capsys: pytest.CaptureFixture[str], run_toml: Path) -> None:
    more = CORES + 1
    assert plan(capsys, run_toml, "--ranks", more) == (
        2,
        "",
        f"A plan prices one rank a core: ranks must be 1 to {CORES} on this machine, not {more}.\n",
    )
    assert plan(capsys, run_toml, "--cluster", "h100-sxm:8", "--seed", 3) == (
        2,
        "",
        f"{run_toml} is planned by its own keys on this machine, and --cluster, --seed describe a "
        "model on a cluster. Give keys instead, as in --layout.tp 2.\n",
    )
    assert plan(capsys, "--model", "llama3-8b", "--context-tokens", 8192) == (
        2,
        "",
        "equipoise plan: needs --cluster, --step-sequences; or a "
        'run.toml, which says them itself. See "equipoise plan --help".\n',
    )
    words = ["--model", "llama3-8b", "--cluster", "h100-sxm:8", "--context-tokens", 8192]
    assert plan(capsys, *words, "--step-sequences", 8, "--ranks", 2, "--train.steps", 5) == (
        2,
        "",
        "equipoise plan: --train.steps, --ranks need a run.toml, and none is given. Give one, or "
        "words of --layout.\n",
    )


def test_a_model_that_fits_nowhere(capsys: pytest.CaptureFixture[str], run_toml: Path) -> None:
    sizes = ["--model.hidden", 8192, "--model.ffn", 32768, "--model.layers", 4096]
    code, out, err = plan(capsys, run_toml, "--ranks", 1, *sizes, "--train.recompute", "full")
    assert (code, out) == (3, "")
    told = err.splitlines()[-1]
    assert told.startswith("small does not fit this-cpu:1: of ")
    assert " layouts the smallest needs " in told
    assert "The smallest that would do, by doubling: this-cpu:" in told or told.endswith(
        "Give more devices, shorter windows or a smaller model."
    )
