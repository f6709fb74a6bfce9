"""plan.request.plan: what the verb prints and keeps, the same refusals, from plain values."""

import dataclasses
import json
from pathlib import Path

import pytest

from equipoise.base.errors import FitError, LayoutError, SpecError
from equipoise.observe.machine import usable_cores
from equipoise.plan.request import PlanRequest, RunPlanRequest, plan
from equipoise.sim.request import StepRequest, simulate
from equipoise.spec.plan import read_plan
from support.verbs import run

MODEL = "layers=4,hidden=1024,heads=8,vocab=8000"
SMALL = PlanRequest(MODEL, "h100-sxm:4", 4096, 16)
FLAGS = ["--model", MODEL, "--cluster", "h100-sxm:4"]
FLAGS += ["--context-tokens", "4096", "--step-sequences", "16"]


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"layout": "tp=2", "recompute": "none", "precision": "fp32"},
        {"lengths": "wikipedia", "policy": "any", "layout": "tp=1,cp=1,pp=1,zero=1", "seed": 2},
        {"layers": "own", "layout": "cp=1,pp=1,zero=1"},
        {"offload": "optimizer", "order": "pp-dp"},
    ],
    ids=str,
)
def test_a_lock_is_what_the_verb_prints(
    capsys: pytest.CaptureFixture[str], more: dict[str, str]
) -> None:
    request = dataclasses.replace(SMALL, **more)
    answer = plan(request)
    words = [word for name, value in request.asked().items() for word in (f"--{name}", value)]
    assert f"equipoise plan {' '.join(words)}" == answer.lock.command
    code, out, _ = run(capsys, "plan", *words, "--json")
    assert code == 0 and json.loads(out) == json.loads(json.dumps(answer.as_row()))


def test_the_best_simulates_as_it_was_priced(tmp_path: Path) -> None:
    answer = plan(SMALL)
    best, words = answer.best, answer.best.words
    step = simulate(
        StepRequest(
            *(MODEL, "h100-sxm:4", words["layout"], 4096, 16),
            micro_batch=int(words["micro-batch"]),
            recompute=words["recompute"],
            schedule=words.get("schedule"),
        )
    )
    row = step.as_row()
    del row["sources"]
    assert row == best.price
    assert answer.bound_s <= step.step_s and answer.gap == step.step_s / answer.bound_s - 1
    assert answer.is_whole and not answer.is_late
    assert answer.listed >= answer.priced >= 1 + len(answer.runners_up)
    assert all(each.price["step_s"] >= step.step_s for each in answer.runners_up)
    answer.lock.write(tmp_path / "plan.lock")
    assert read_plan(tmp_path / "plan.lock") == answer.lock
    exported = plan(dataclasses.replace(SMALL, export="megatron")).export("megatron")
    assert exported.startswith("--num-layers 4") or "--num-layers 4\n" in exported


def test_a_search_goes_on_from_its_folder(tmp_path: Path) -> None:
    request = dataclasses.replace(SMALL, out=tmp_path / "kept")
    first = plan(request)
    lines = (tmp_path / "kept" / "search.jsonl").read_text()
    again = plan(request)
    assert again.lock.best == first.lock.best and lines.count("\n") > 1
    assert (tmp_path / "kept" / "search.jsonl").read_text() == lines


def test_a_run_is_planned_by_its_file(
    texts: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'[data]\nsource = "text"\npath = "{texts}"\nvocab = 300\ncache = "{cache}"\n[model]\n'
        "layers = 2\nhidden = 32\nheads = 2\nkv_heads = 1\nffn = 48\nvocab = 320\n"
        "head_width = 16\n[pack]\ncontext_tokens = 256\nstep_tokens = 1024\n"
    )
    said: list[str] = []
    request = RunPlanRequest.read(file, {"layout.zero": 1}, ranks=1)
    answer = plan(request, say=said.append)
    assert answer.lock.asked == {"run.toml": str(file), "ranks": "1", "layout.zero": "1"}
    assert answer.best.keys["layout.zero"] == 1 and len(said) <= 1
    code, out, _ = run(
        *(capsys, "plan", file, "--ranks", 1, "--layout.zero", 1, "--json"),
        *("--out", tmp_path),
    )
    assert code == 0 and json.loads(out) == json.loads(json.dumps(answer.as_row()))
    more = len(usable_cores()) + 1
    with pytest.raises(
        LayoutError, match=f"ranks must be 1 to {more - 1} on this machine, not {more}"
    ):
        plan(RunPlanRequest.read(file, ranks=more))
    with pytest.raises(SpecError, match=r"layout\.tpp: no such key\. Nearest: --layout\.tp"):
        RunPlanRequest.read(file, {"layout.tpp": 1})


def test_what_is_refused() -> None:
    with pytest.raises(SpecError) as refused:
        plan(dataclasses.replace(SMALL, seconds=0.0))
    assert str(refused.value) == "seconds is 0. Give a time above 0."
    with pytest.raises(SpecError) as refused:
        plan(dataclasses.replace(SMALL, policy="gangs"))
    assert str(refused.value) == (
        "policy = gangs needs lengths, the documents that it packs. Give both or neither."
    )
    with pytest.raises(FitError) as large:
        plan(PlanRequest("llama3-70b", "h100-sxm:8", 4096, 8, layout="cp=1", offload="none"))
    assert "The smallest that would do, by doubling: h100-sxm:16." in str(large.value)
    for name, value in (("export", "nemo"), ("layers", "each"), ("offload", "all")):
        with pytest.raises(SpecError, match=f'{name}: "{value}" is not one of '):
            plan(dataclasses.replace(SMALL, **{name: value}))
