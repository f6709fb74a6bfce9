"""``equipoise explain pipeline``: documents and runs that it takes, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.cli.main import main


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["explain", "pipeline", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    return json.loads(shown(capsys, *argv, "--json"))


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["explain", "pipeline", *argv]) != 0
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_the_pipeline_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("50\n70\n30\n")
    run = tmp_path / "run.toml"
    run.write_text(
        '[model]\npreset = "7m"\n[pack]\ncontext_tokens = 64\nstep_tokens = 512\n'
        'policy = "in-order"\n[layout]\ndp = 2\n'
    )
    answer = told(capsys, str(run), "--lengths", str(lengths), "--ranks", "3")
    assert len(answer["micro_batches"]) == 4
    assert {sum(each["documents"]) for each in answer["micro_batches"]} == {64}
    assert answer["origin"] == f"first step of {lengths}, rank 0 of 2"
    assert (answer["model"], answer["policy"]) == ({"name": "7m", "layers": 6}, "in-order")
    flags = ("--ranks", "3", "--micro-batches", "6", "--policy", "by-work")
    answer = told(capsys, str(run), "--lengths", str(lengths), *flags)
    assert (len(answer["micro_batches"]), answer["policy"]) == (6, "by-work")
    out = shown(capsys, str(run), "--lengths", str(lengths), "--ranks", "3", "--layout.cp", "2")
    assert " ".join(out.split()).endswith("(assumed). layout.cp and layout.tp are not priced.")


def test_lists_are_packed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--lengths", "900,30,40,20,0", "--model", "2m", "--ranks", "2")
    answer = told(capsys, *flags, "--micro-batches", "3")
    assert 900 in [tokens for each in answer["micro_batches"] for tokens in each["documents"]]
    assert sum(sum(each["documents"]) for each in answer["micro_batches"]) == 990
    answer = told(capsys, *flags, "--context-tokens", "100", "--policy", "in-order")
    assert [sum(each["documents"]) for each in answer["micro_batches"]] == [100] * 9 + [90]


@pytest.mark.parametrize("lengths", ["1", "5", "7,", "3,0,2"])
def test_packs_of_next_to_nothing(capsys: pytest.CaptureFixture[str], lengths: str) -> None:
    argv = ("--lengths", lengths, "--ranks", "3", "--model", "7m")
    for strategy in ("1f1b", "zb-v", "all"):
        assert "(assumed)." in shown(capsys, *argv, "--strategy", strategy)


def test_explaining_loads_no_torch_and_no_matplotlib() -> None:
    code = (
        "import sys\n"
        "from equipoise.cli.main import main\n"
        "main(['explain', 'pipeline', '--quiet'])\n"
        "print([name for name in ('torch', 'matplotlib') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--strategy", "zbv") == (
        '--strategy: "zbv" is not one of all, gpipe, 1f1b, interleaved, zb-h1, zb-h2, '
        "interleaved-zb, zb-v, dualpipe-v, v-half, v-min, auto, skip-partial, skip-reordered. "
        'Nearest: "zb-v".\n'
    )
    assert refused(capsys, "--mask", "causal") == (
        "equipoise explain pipeline: --mask: no such flag. Nearest: --skip\n"
    )
    assert refused(capsys, "--chunks", "0") == "--chunks 0 is below 1. Give 1 or more.\n"
    for speed in ("nan", "0", "1e-12", "inf"):
        assert refused(capsys, "--tflop-per-s", speed) == (
            f"--tflop-per-s {speed} is not between 0.001 and 1,000,000, and times are whole "
            "nanoseconds. Give a speed of a rank in TFLOP/s.\n"
        )
    assert refused(capsys, "--dtype", "fp64") == (
        'equipoise explain pipeline: --dtype: "fp64" is not one of bf16, fp32. See '
        '"equipoise explain pipeline --help".\n'
    )
    assert refused(capsys, "--most-held", "0") == (
        "--most-held 0 holds nothing. Give a number above 0.\n"
    )
    assert refused(capsys, "--most-held", "1", "--memory", "2") == (
        "--most-held and --memory bound the same. Give one of them.\n"
    )
    assert refused(capsys, "--skip", "0.5") == (
        "--skip 0.5 goes with --strategy skip-partial or skip-reordered, which train another "
        "model, not with 1f1b. Leave it out.\n"
    )
    assert refused(capsys, "--lengths", "0") == (
        "--lengths 0: there is no token to train on. Give lengths.\n"
    )
    assert refused(capsys, "--strategy", "zb-h2", "--most-held", "3") == (
        "zb-h2 holds 47.3 GiB of activations on rank 0, 20.3 GiB are allowed: 27.0 GiB too many. "
        "These fit: v-half, 2 stages a rank (20.3 GiB), v-min, 2 stages a rank (13.5 GiB), auto "
        "(20.3 GiB), auto, 2 stages a rank (20.3 GiB), skip-partial, 2 stages a rank (20.3 GiB), "
        "skip-reordered, 2 stages a rank (20.3 GiB).\n"
    )
    assert refused(capsys, "--strategy", "auto", "--most-held", "0.5") == (
        "auto needs 6.8 GiB for the largest micro-batch, or those that share a document, on rank "
        "0, 3.4 GiB are allowed: 3.4 GiB too many. Nothing fits: allow more, or make "
        "micro-batches smaller.\n"
    )
    assert refused(capsys, "--strategy", "all", "--chunks", "9", "--model", "7m").startswith(
        "No strategy can run: 6 layers cannot fill 36 stages. "
    )
    assert (
        " ".join(shown(capsys, "--strategy", "all", "--model", "7m", "--ranks", "6").split()).count(
            "zb-v, dualpipe-v, v-half, v-min, auto, skip-partial, skip-reordered. 6 layers"
        )
        == 1
    )
    assert refused(capsys, "--trace", "step.svg") == (
        '--trace step.svg: a trace\'s name ends in .json, not ".svg". Try step.json.\n'
    )
    missing = tmp_path / "no" / "step.json"
    assert refused(capsys, "--trace", str(missing)) == (
        f"--trace {missing}: there is no folder {missing.parent}. Create it first.\n"
    )
