"""``equipoise simulate``: its keys, its words, its files, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from equipoise.cli.main import main
from equipoise.cost.step.request import Residuals, residuals_of
from equipoise.spec.catalog import POLICIES
from equipoise.spec.device.by_name import find_device

ASKED = (
    "simulate",
    "--model=llama3-405b",
    "--cluster=h100-sxm:8192",
    "--layout=tp=8,cp=1,pp=16,dp=64",
    "--context-tokens=8192",
    "--step-sequences=2048",
)
SMALL = (
    "simulate",
    "--model=llama3-8b",
    "--cluster=h100-sxm:16",
    "--context-tokens=8192",
    "--step-sequences=32",
)


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found: dict[str, Any] = json.loads(captured.out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_straight_question(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *ASKED)
    # Published for this layout: 430 TFLOP/s of 989 (arXiv:2407.21783, table 4).
    assert 350 < found["tflops_per_device"] < 480
    assert found["mfu"] == pytest.approx(found["tflops_per_device"] / 989.4)
    assert found["useful_mfu"] < found["mfu"]
    tokens = 8192 * 2048 / 8192 / found["step_s"]
    assert found["tokens_per_s_per_device"] == pytest.approx(tokens)
    assert sum(found["terms"].values()) == pytest.approx(found["step_s"], rel=1e-6)
    assert sum(found["memory"].values()) == pytest.approx(found["memory_gib_max"])
    assert found["fits"] == (found["memory_gib_max"] <= found["capacity_gib"])
    assert len(found["memory_gib"]) == 16
    assert sum(found["stages"]["layers"]) == 126
    assert found["energy_j_per_token"] * 8192 * 2048 == pytest.approx(found["energy_j_per_step"])
    assert found["usd_per_million_tokens"] > 0
    assert {"peaks", "link ib-ndr", "matrix products", "usd_per_hour"} <= set(found["sources"])


def test_stages_with_as_many_layers_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED]) == 0
    assert "Layers of the stages: 7, 14 x 8, 7." in capsys.readouterr().out


def test_every_word_of_a_layout(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--layout=tp=2,pp=4,dp=2,virtual=2,zero=2"
    interleaved = answer(capsys, *SMALL, words, "--recompute=full", "--precision=fp8")
    assert len(interleaved["stages"]["layers"]) == 8
    sparse = answer(
        capsys,
        "simulate",
        "--model=mixtral-8x7b",
        "--cluster=h100-sxm:16",
        "--layout=dp=16,ep=8,etp=1",
        "--context-tokens=4096",
        "--step-sequences=32",
        "--expert-skew=1.3",
    )
    assert {"experts", "expert traffic"} <= set(sparse["terms"])


def test_every_flag_of_a_step_changes_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that is parsed and not passed on answers another question."""
    layout = "--layout=cp=4,pp=2,dp=2"
    asked = ("--lengths=prolong", "--context-strategy=ring")
    plain = answer(capsys, *SMALL, layout, *asked)
    for flag in (
        "--context-tokens=16384",
        "--step-sequences=64",
        "--micro-batch=2",
        "--recompute=full",
        "--offload=both",
        "--precision=fp8",
        "--schedule=zb-h1",
        "--context-strategy=ulysses",
        "--context-strategy=all-gather",
        "--order=pp-dp",
        "--lengths=wikipedia",
        "--policy=in-order",
        "--seed=1",
    ):
        found = answer(capsys, *SMALL, layout, *asked, flag)
        assert (found["step_s"], found["memory_gib"]) != (plain["step_s"], plain["memory_gib"])


def test_lengths_matter(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(["512"] * 64))
    layout = "--layout=dp=16,zero=3"
    full = answer(capsys, *SMALL, layout)
    short = answer(capsys, *SMALL, layout, f"--lengths={file}")
    real = answer(capsys, *SMALL, layout, "--lengths=prolong", "--seed=1")
    assert short["terms"]["attention"] < 0.5 * real["terms"]["attention"]
    assert short["step_s"] < full["step_s"]
    plain = answer(capsys, *SMALL, layout, "--lengths=prolong", "--seed=1", "--policy=in-order")
    assert plain["step_s"] != real["step_s"]


def test_a_table_a_line_a_picture_and_a_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    layout = "--layout=tp=2,pp=4,dp=2"
    trace, plot = tmp_path / "step.json", tmp_path / "step.svg"
    assert main([*SMALL, layout, f"--trace={trace}", f"--plot={plot}", "--sources"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("llama3-8b on h100-sxm:16, tp=2,pp=4,dp=2: a step of 262,144 tokens")
    assert "products" in out and "optimizer" in out and "J a token" in out
    assert "\n  node: NVIDIA DGX H100: 8 x ConnectX-7\n" in out
    assert out.endswith(f"{plot}\n{trace}\n")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "C"} == {
        f"rank {rank} memory [GiB]" for rank in range(4)
    }
    assert plot.read_text().startswith("<?xml")
    assert main([*SMALL, layout, "--quiet"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--layout=dp=8",),
            "dp x cp x tp x pp = 8 x 1 x 1 x 1 = 8 ranks, but there are 16. Set dp = 16.\n",
        ),
        (
            ("--layout=dp=16", "--schedule=1f2b"),
            'schedule: "1f2b" is not one of gpipe, 1f1b, interleaved, zb-h1, zb-h2, '
            "interleaved-zb, zb-v, dualpipe-v, v-half, v-min, auto. Nearest: "
            '"1f1b".\n',
        ),
        (
            ("--layout=dp=16", "--lengths=prolong", "--policy=by-wrok"),
            'policy: "by-wrok" is not one of in-order, fixed, fixed-exact, by-tokens, by-work, '
            "delayed, divided, divided-in-time, gangs, flexsp, bytescale. Nearest: "
            '"by-work".\n',
        ),
        (
            ("--layout=dp=16", "--plot=step.gif"),
            '--plot step.gif: a picture\'s name ends in .png, .svg or .pdf, not ".gif". Try '
            "step.png.\n",
        ),
        (
            ("--layout=dp=16", "--trace=nowhere/step.json"),
            "--trace nowhere/step.json: there is no folder nowhere. Create it first.\n",
        ),
    ],
)
def test_what_is_refused(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert refused(capsys, *SMALL, *flags) == message


def test_jitter_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "--layout=tp=2,pp=4,dp=2"
    asked = (*SMALL, layout, "--jitter=0.1", "--mtbf-hours=2000", "--restart-s=300")
    found = answer(capsys, *asked)
    assert found["jitter"]["p95"] >= found["jitter"]["mean"] > 1
    assert 0.9 < found["goodput"]["goodput"] < 1
    assert "goodput" not in answer(capsys, *SMALL, layout)
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "With jitter the step takes" in out
    assert "of the time goes into steps that are kept" in out


def test_what_would_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *ASKED)
    assert not found["fits"]
    changes = [each["change"] for each in found["would_fit"]]
    assert {"zero=2", "--recompute full"} <= set(changes)
    for each in found["would_fit"]:
        assert each["memory_gib_max"] <= found["capacity_gib"]
    times = [each["step_s"] for each in found["would_fit"]]
    assert times == sorted(times)
    assert main(ASKED) == 0
    assert f"Changes of one setting that fit: {changes[0]} (" in capsys.readouterr().out
    asked = ("simulate", "--model=llama3-70b", "--cluster=h100-sxm:64", "--layout=dp=64")
    assert main([*asked, "--context-tokens=8192", "--step-sequences=64"]) == 0
    out = capsys.readouterr().out
    assert "No change of one setting fits: give more devices, or higher degrees." in out


def test_this_machine_has_no_residuals_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert residuals_of(find_device("this-cpu")) == Residuals()
    here = ("simulate", "--model=2m", "--cluster=this-cpu:2", "--layout=dp=2")
    found = answer(capsys, *here, "--context-tokens=256", "--step-sequences=4")
    assert found["step_s"] > 0
    assert found["usd_per_step"] is None


def test_how_sure_a_step_is(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "--layout=tp=2,cp=4,dp=2"
    found = answer(capsys, *SMALL, layout)
    sure = found["interval"]
    assert sure["share"] == 0.8
    assert sure["low_s"] < found["step_s"] < sure["high_s"]
    assert sum(each["seconds"] for each in found["spreads"]) == pytest.approx(found["step_s"])
    assert main([*SMALL, layout]) == 0
    without = capsys.readouterr().out
    assert main([*SMALL, layout, "--explain"]) == 0
    explained = capsys.readouterr().out
    assert "80% of such steps take between" in without
    assert explained.startswith(without)
    assert "What makes the step's time unsure, largest first:" in explained
    assert all(each["curve"] in explained[len(without) :] for each in found["spreads"])


def test_a_cluster_of_two_classes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mixed.toml"
    node = '[[nodes]]\ndevice = "{}"\nnodes = 1\n'
    classes = node.format("h100-sxm") + node.format("a100-80")
    file.write_text(f'name = "mixed"\nbetween = "ethernet-100"\n{classes}')
    asked = [*SMALL, "--layout=tp=2,pp=4,dp=2", "--micro-batch=2"]
    mixed = answer(capsys, *asked, f"--cluster={file}")
    fast, slow = (
        answer(capsys, *asked, f"--cluster={name}:16") for name in ("h100-sxm", "a100-80")
    )
    assert mixed["step_s"] >= slow["step_s"] > fast["step_s"]
    hourly = [each["usd_per_step"] / each["step_s"] for each in (fast, slow, mixed)]
    assert hourly[2] == pytest.approx((hourly[0] + hourly[1]) / 2)


def test_lengths_below_zero(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("512\n-3\n")
    assert refused(capsys, *SMALL, "--layout=dp=16", f"--lengths={file}") == (
        f"{file}:2  '-3' is not a document length. Give each document one whole number of tokens, "
        "1 to 2,147,483,647, and leave empty documents out.\n"
    )


POLICIES_HERE = {
    "dp=16": [each for each in POLICIES if each != "divided-in-time"],
    "tp=2,pp=2,dp=4": [each for each in POLICIES if not POLICIES[each].runs_together],
    "tp=2,cp=2,dp=4": [each for each in POLICIES if not POLICIES[each].divides],
}


@pytest.mark.long
@pytest.mark.parametrize("layout", POLICIES_HERE)
def test_every_policy_has_the_work_of_its_documents(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, layout: str
) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(["16384", *["700"] * 351, "60"]))  # of 16 windows, one epoch
    asked = [
        *SMALL,
        "--context-tokens=16384",
        "--step-sequences=16",
        f"--lengths={file}",
        f"--layout={layout}",
        "--json",
    ]
    flop = {}
    for policy in POLICIES_HERE[layout]:
        assert main([*asked, f"--policy={policy}"]) == 0
        row = json.loads(capsys.readouterr().out)
        flop[policy] = row["useful_tflops_per_device"] * row["step_s"]
    whole = flop["by-work"]
    cut = ("in-order", "fixed", "fixed-exact", "delayed")  # at windows, or other documents
    for policy, found in flop.items():
        assert policy in cut or found == pytest.approx(whole, rel=1e-12)


def test_documents_that_one_rank_holds_in_parts_are_waited_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(["65536", *["1000"] * 983, "40"]))
    asked = [*SMALL, "--context-tokens=65536", "--step-sequences=16", f"--lengths={file}"]
    asked += ["--layout=dp=16", "--json"]
    steps = {}
    for policy in ("by-work", "divided", "gangs", "flexsp"):
        assert main([*asked, f"--policy={policy}"]) == 0
        row = json.loads(capsys.readouterr().out)
        steps[policy] = row["step_s"]
        if policy != "by-work":
            assert row["terms"]["context traffic"] > 0
            assert steps[policy] < steps["by-work"]
