"""plan --layers own and simulate --layers; clusters of several classes of nodes."""

import json
from pathlib import Path

import pytest

from support.verbs import run

STEP = ["--context-tokens", "8192", "--step-sequences", "64"]
MODEL = ["--model", "layers=24,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=32000"]
FIXED = ["--layout", "tp=1,cp=1,pp=8,zero=1", "--micro-batch", "1", "--schedule", "1f1b"]
TIGHT = [*MODEL, "--cluster", "a100-40:8", *STEP]
GROWN = """\
name = "grown"
between = "ethernet-25"

[[nodes]]
device = "a100-80"
nodes = 1
nic = "roce-200"

[[nodes]]
device = "h100-sxm"
nodes = 1
nic = "ib-ndr"
"""


def test_layers_of_their_own_are_faster_and_simulate_alike(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = run(capsys, "plan", *TIGHT, *FIXED, "--json")
    assert code == 0
    alike = json.loads(out)["best"]
    asked = [*TIGHT, *FIXED, "--layers", "own", "--out", str(tmp_path)]
    code, out, _ = run(capsys, "plan", *asked, "--json")
    assert code == 0
    plan = json.loads(out)
    best = plan["best"]
    assert best["price"]["step_s"] < alike["price"]["step_s"] and best["price"]["fits"]
    assert plan["runners_up"][0]["words"] == alike["words"]
    assert plan["asked"]["layers"] == "own" and plan["wall"] == []
    flags = [part for flag, value in best["words"].items() for part in (f"--{flag}", value)]
    code, out, _ = run(capsys, "simulate", *TIGHT, *flags, "--json")
    assert code == 0
    assert json.loads(out) == best["price"] | {"sources": plan["sources"]}
    code, out, _ = run(capsys, "explain", "plan", str(tmp_path / "plan.lock"))
    assert code == 0
    assert f"Layers of the best: {best['words']['layers']}." in out
    assert "strategies of layers" in out and "None with all layers alike can be faster" in out


def test_stages_stand_on_classes_of_nodes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "grown.toml"
    file.write_text(GROWN)
    asked = [*MODEL, "--cluster", str(file), *STEP]
    laid = ["--layout", "pp=2,dp=8", "--micro-batch", "2", "--recompute", "full"]
    code, out, _ = run(capsys, "simulate", *asked, *laid, "--order", "pp-dp", "--json")
    assert code == 0
    inside = json.loads(out)
    assert inside["stages"]["nodes"] == ["a100-80", "h100-sxm"]
    slow, fast = inside["stages"]["layers"]
    assert fast > slow
    code, out, _ = run(capsys, "simulate", *asked, *laid, "--order", "pp-dp")
    assert "Stages stand on: a100-80, h100-sxm." in out
    code, out, _ = run(capsys, "simulate", *asked, *laid, "--json")
    across = json.loads(out)
    assert across["stages"]["nodes"] == ["a100-80+h100-sxm"] * 2
    assert across["step_s"] > inside["step_s"]
    fixed = ["--layout", "cp=1,zero=1", *laid[2:], "--schedule", "1f1b", "--seconds", "300"]
    code, out, _ = run(capsys, "plan", *asked, *fixed, "--json")
    assert code == 0
    plan = json.loads(out)
    assert plan["bound_s"] <= plan["best"]["price"]["step_s"] <= inside["step_s"]
    assert plan["gap"] <= 0.01


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["plan", *TIGHT, "--layers", "own", "--export", "megatron"],
            "layers = own plans layers that differ, and export = megatron has one setting for all. "
            "Export a plan of layers = alike.\n",
        ),
        (
            ["simulate", *TIGHT, "--layout", "pp=8", "--layers", "23:dp=1:none"],
            "23 strategies for a model of 24 layers. Give each layer one.\n",
        ),
    ],
)
def test_what_cannot_be(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert run(capsys, *argv) == (2, "", message)
