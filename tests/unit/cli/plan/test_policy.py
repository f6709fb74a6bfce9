"""plan --policy any: the faster packing of documents, in words that simulate takes; idle flags."""

import json
from pathlib import Path

import numpy as np
import pytest

from equipoise.cost.step.request import StepOptions
from equipoise.plan.answer.run_steps import COMPARED
from equipoise.sim.drawn import step_packer
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import preset
from support.verbs import run

SMALL = ["--model", "layers=4,hidden=1024,heads=8,vocab=8000", "--cluster", "h100-sxm:4"]
SMALL += ["--context-tokens", "4096", "--step-sequences", "16"]
FIXED = ["--layout", "cp=1,pp=1,zero=1", "--recompute", "none", "--micro-batch", "1"]


@pytest.fixture
def documents(tmp_path: Path) -> list[str]:
    draw = np.random.default_rng(0)
    lengths = np.minimum(np.exp(draw.normal(6.5, 1.0, 400)).astype(int) + 64, 4096)
    file = tmp_path / "lengths.txt"
    file.write_text("".join(f"{length}\n" for length in lengths))
    return ["--lengths", str(file)]


def test_any_is_the_faster_policy_and_simulates_alike(
    capsys: pytest.CaptureFixture[str], documents: list[str]
) -> None:
    asked = ["plan", *SMALL, *FIXED, *documents, "--json"]
    searched = (*COMPARED, "divided", "gangs", "bytescale")  # one over time needs a pipeline
    *single, every = (
        json.loads(run(capsys, *asked, "--policy", policy)[1]) for policy in (*searched, "any")
    )
    steps = {
        name: plan["best"]["price"]["step_s"] for name, plan in zip(searched, single, strict=True)
    }
    best = every["best"]
    assert best["price"]["step_s"] == min(steps.values()) < max(steps.values())
    assert best["words"]["policy"] == min(steps, key=lambda name: steps[name])
    assert every["asked"]["policy"] == "any"
    assert every["listed"] == sum(plan["listed"] for plan in single)
    told = {each["words"]["policy"] for each in (best, *every["runners_up"])}
    assert len(told) > 1 and told <= set(searched)
    for each in (best, *every["runners_up"]):
        flags = [part for flag, value in each["words"].items() for part in (f"--{flag}", value)]
        code, out, _ = run(capsys, "simulate", *SMALL, *flags, "--json")
        row = json.loads(out)
        del row["sources"]
        assert code == 0 and row == each["price"]


def test_the_given_policy_is_no_word_of_a_choice(
    capsys: pytest.CaptureFixture[str], documents: list[str], tmp_path: Path
) -> None:
    locks = []
    for more in ([], ["--policy", "by-work"]):
        out = tmp_path / str(len(locks))
        asked = ["plan", *SMALL, *FIXED, *documents, *more, "--out", str(out), "--quiet"]
        assert run(capsys, *asked)[0] == 0
        locks.append((out / "plan.lock").read_bytes())
    assert locks[0] == locks[1]
    lock = json.loads(locks[0])
    assert "policy" not in lock["asked"] and "policy" not in lock["best"]["words"]


def test_a_lock_of_any_policy_is_resumed_and_explained(
    capsys: pytest.CaptureFixture[str], documents: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = ["plan", *SMALL, *documents, "--layout", "cp=1,zero=1", "--out", str(out)]
    assert run(capsys, *asked, "--quiet")[0] == 0  # of another policy: is not read
    code, told, _ = run(capsys, *asked, "--policy", "any")
    lock, state = (out / "plan.lock").read_text(), (out / "search.jsonl").read_text()
    best = json.loads(lock)["best"]["words"]
    named = f"{best['layout']} micro-batch {best['micro-batch']} {best['policy']}"
    assert code == 0 and told.startswith(named)
    lines = state.splitlines(keepends=True)
    (out / "search.jsonl").write_text("".join(lines[: len(lines) // 2]))
    (out / "plan.lock").unlink()
    assert run(capsys, *asked, "--policy", "any", "--quiet")[0] == 0
    assert (out / "plan.lock").read_text() == lock
    assert sorted((out / "search.jsonl").read_text().splitlines(keepends=True)) == sorted(lines)
    code, told, _ = run(capsys, "explain", "plan", str(out / "plan.lock"))
    assert code == 0 and told.startswith(named)
    changed = json.loads(lock)
    changed["read"]["cluster"] = "another"
    del changed["digest"]
    (out / "plan.lock").write_text(json.dumps(changed))
    code, _, err = run(capsys, "explain", "plan", str(out / "plan.lock"))
    assert code == 4
    assert f'{" ".join(documents)} --policy any --out {out}".' in err


@pytest.mark.parametrize(
    "more", [["--offload", "any"], ["--layers", "own"], ["--export", "megatron"]], ids=str
)
def test_any_policy_goes_with_other_searches(
    capsys: pytest.CaptureFixture[str], documents: list[str], tmp_path: Path, more: list[str]
) -> None:
    out = tmp_path / "out"
    asked = [*SMALL, *FIXED, *documents, "--policy", "any", *more, "--out", str(out), "--quiet"]
    assert run(capsys, "plan", *asked)[0] == 0
    best = json.loads((out / "plan.lock").read_text())["best"]
    flags = [part for flag, value in best["words"].items() for part in (f"--{flag}", value)]
    code, told, _ = run(capsys, "simulate", *SMALL, *flags, "--json")
    assert code == 0 and json.loads(told)["step_s"] == best["price"]["step_s"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--policy", "any"],
            "policy = any needs lengths, the documents that it packs. Give both or neither.\n",
        ),
        (
            ["--policy", "by-work"],
            "policy = by-work needs lengths, the documents that it packs. Give both or neither.\n",
        ),
        (
            ["--policy", "by-wrok", "--lengths", "wikipedia"],
            'policy: "by-wrok" is not one of in-order, fixed, fixed-exact, by-tokens, by-work, '
            'delayed, divided, divided-in-time, gangs, flexsp, bytescale. Nearest: "by-work".\n',
        ),
        (
            ["--policy", "delayed", "--lengths", "wikipedia"],
            "policy = delayed packs other documents for every layout, so their steps cannot be "
            "compared. Plan with policy = by-work, and price its layout under delayed with "
            "equipoise simulate.\n",
        ),
        (
            ["--policy", "gangs", "--lengths", "wikipedia", "--layout", "cp=2"],
            'pack.policy = "gangs" divides documents over ranks itself, and layout.cp = 2 '
            'would divide them again. Set layout.cp = 1, or pack.policy = "by-work".\n',
        ),
        (
            ["--policy", "divided", "--lengths", "wikipedia", "--layers", "own"],
            "policy = divided divides documents, which is priced on a cluster of one class, with "
            "all layers alike, and not with export or on this machine. Take policy = by-work.\n",
        ),
        (
            ["--expert-skew", "2"],
            "expert_skew = 2 needs a model with experts, and this one has none. Leave expert_skew "
            "out.\n",
        ),
        (
            ["--layout", "cp=1", "--context-strategy", "ring"],
            "context_strategy = ring needs context ranks; cp = 1. Give cp of 2 or more, or leave "
            "context_strategy out.\n",
        ),
    ],
)
def test_flags_that_change_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert run(capsys, "plan", *SMALL, *flags, "--quiet") == (2, "", message)


def test_a_run_has_a_key_for_its_policy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('name = "x"\n')
    assert run(capsys, "plan", str(file), "--policy", "any", "--quiet") == (
        2,
        "",
        f"{file} is planned by its own keys on this machine, and --policy describes a model on a "
        f"cluster. Give keys instead, as in --layout.tp 2.\n",
    )


@pytest.mark.parametrize("policy", [*COMPARED, "in-order", "fixed"])
@pytest.mark.parametrize("windows", [1, 2, 4])
def test_a_micro_batch_of_windows_is_a_token_cap(policy: str, windows: int) -> None:
    options = StepOptions(4096, 32, micro_batch=windows, policy=policy)
    layout = Layout(dp=4)
    packed = step_packer(preset("llama3-8b"), "wikipedia", options)(layout, options)
    tokens = [sum(batch) for rank in packed for batch in rank]
    cap = windows * 4096
    assert sum(tokens) == 4096 * 32
    assert max(tokens) <= (1.25 if policy in COMPARED else 1.0) * cap
    assert max(length for rank in packed for batch in rank for length in batch) <= 4096
    assert {len(rank) for rank in packed} == {options.count_micro_batches(layout)}
    assert max(sum(map(len, rank)) for rank in packed) > options.count_micro_batches(layout)
