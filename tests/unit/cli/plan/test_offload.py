"""What fits only with host memory is planned there; what cannot be offloaded is said."""

import json
from pathlib import Path

import pytest

from support.verbs import run

ALONE = ["--model", "llama3-8b", "--context-tokens", "8192", "--step-sequences", "8"]
ALONE += ["--cluster", "h100-sxm:1"]
SMALL = ["--model", "layers=4,hidden=1024,heads=8,vocab=8000", "--cluster", "h100-sxm:4"]
SMALL += ["--context-tokens", "4096", "--step-sequences", "16"]


def test_a_model_that_fits_only_with_offloading_is_planned_with_both_prices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = run(capsys, "plan", *ALONE, "--out", str(tmp_path))
    assert code == 0
    lock = json.loads((tmp_path / "plan.lock").read_text())
    best, without = lock["best"], lock["without_offload"]
    assert best["words"]["offload"] == "optimizer"
    assert best["price"]["memory_gib_max"] <= best["price"]["capacity_gib"]
    assert 0 < best["price"]["host_memory_gib_max"] <= best["price"]["host_capacity_gib"]
    assert best["price"]["terms"]["offload traffic"] > 0
    assert without["memory_gib_max"] > best["price"]["capacity_gib"]
    assert without["step_s"] < best["price"]["step_s"]
    assert "Without offloading this layout takes 6.77 s a step and needs 167.1 GiB of 78.7." in out
    assert "134.6 GiB in its host's memory of 238.4." in out

    flags = [part for flag, value in best["words"].items() for part in (f"--{flag}", value)]
    code, told, _ = run(capsys, "simulate", *ALONE, *flags, "--json")
    row = json.loads(told)
    del row["sources"]
    assert code == 0 and row == best["price"]

    again = run(capsys, "plan", *ALONE, "--out", str(tmp_path), "--quiet")
    assert again[0] == 0 and json.loads((tmp_path / "plan.lock").read_text()) == lock
    state = (tmp_path / "search.jsonl").read_text().splitlines()
    assert len(state) == len(set(state)) == lock["priced"] + 1
    code, told, _ = run(capsys, "explain", "plan", str(tmp_path / "plan.lock"))
    assert code == 0 and "offload traffic" in told and "Without offloading" in told


def test_what_fits_offloads_nothing_unless_that_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fixed = ["--layout", "cp=1,pp=1", "--json"]
    plain, some, every = (
        json.loads(run(capsys, "plan", *SMALL, *fixed, *more)[1])
        for more in ([], ["--offload", "activations"], ["--offload", "any"])
    )
    assert "offload" not in plain["best"]["words"] and plain["without_offload"] is None
    assert "offload" not in plain["asked"]
    assert every["best"] == plain["best"] and every["listed"] == plain["listed"]
    assert some["best"]["words"]["offload"] == some["asked"]["offload"] == "activations"
    assert some["best"]["price"]["step_s"] >= plain["best"]["price"]["step_s"]
    assert some["without_offload"]["step_s"] <= some["best"]["price"]["step_s"]


def test_a_stale_lock_says_what_was_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(capsys, "plan", *ALONE, "--offload", "any", "--out", str(tmp_path))[0] == 0
    file = tmp_path / "plan.lock"
    lock = json.loads(file.read_text())
    lock["read"]["cluster"] = "another"
    del lock["digest"]
    file.write_text(json.dumps(lock))
    code, _, err = run(capsys, "explain", "plan", str(file))
    assert code == 4
    assert f"{file} is stale: cluster changed since it was written." in err
    assert f"--step-sequences 8 --offload any --out {tmp_path}" in err


def test_exports(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", *ALONE, "--export", "megatron")
    assert code == 3  # its master weights stay
    assert err == (
        "llama3-8b does not fit h100-sxm:1: of 24 layouts the smallest, with offload = both, needs "
        "83.3 GiB on its fullest rank, which has 78.7. The smallest that would do, by doubling: "
        "h100-sxm:2.\n"
    )
    two = ["--cluster", "h100-sxm:2", "--offload", "optimizer", "--layout", "zero=1"]
    code, out, _ = run(capsys, "plan", *ALONE, *two, "--export", "megatron")
    assert code == 0
    assert out.splitlines()[-3:] == [
        "--optimizer-cpu-offload",
        "--optimizer-offload-fraction 1.0",
        "--use-precision-aware-optimizer",
    ]
    code, _, err = run(capsys, "plan", *ALONE, "--export", "torchtitan")
    assert code == 3
    assert err == (
        "llama3-8b does not fit h100-sxm:1: of 8 layouts the smallest needs 144.2 GiB on its "
        "fullest rank, which has 78.7. The smallest that would do, by doubling: h100-sxm:2.\n"
    )


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (
            ["plan", *ALONE, "--offload", "activations"],
            3,
            "llama3-8b does not fit h100-sxm:1: of 28 layouts the smallest, with offload = "
            "activations, needs 141.2 GiB on its fullest rank, which has 78.7. The smallest that "
            "would do, by doubling: h100-sxm:2.\n",
        ),
        (
            ["plan", *ALONE, "--model", "llama3-70b", "--cluster", "h100-sxm:4"],
            3,
            "llama3-70b does not fit h100-sxm:4: of 14,840 layouts the smallest, with offload = "
            "both, needs 255.3 GiB on its fullest rank, which has 78.7. The smallest that would "
            "do, by doubling: h100-sxm:8.\n",
        ),
        (
            ["plan", *ALONE, "--model", "llama3-70b", "--offload", "both"],
            3,
            "llama3-70b does not fit h100-sxm:1: of 28 layouts the smallest, with offload = both, "
            "needs more host memory than a device's share of it, 238.4 GiB. The smallest that "
            "would do, by doubling: h100-sxm:8.\n",
        ),
        (
            ["plan", *ALONE, "--cluster", "this-cpu:2", "--offload", "any"],
            2,
            "this-cpu computes in host memory, so there is nowhere to offload to. Omit "
            "--offload.\n",
        ),
        (
            ["plan", *ALONE, "--layers", "own", "--offload", "any"],
            2,
            "layers with strategies of their own keep everything on the device, so offload = any "
            "does not go with them. Leave layers or offload out.\n",
        ),
        (
            [
                *("simulate", *ALONE, "--layout", "dp=1", "--offload", "both"),
                *("--layers", "32:tp=1,dp=1,zero=1:none"),
            ],
            2,
            "layers with strategies of their own keep everything on the device, so offload = both "
            "does not go with them. Leave layers or offload out.\n",
        ),
        (
            ["plan", *ALONE, "--export", "torchtitan", "--offload", "optimizer"],
            2,
            "torchtitan can do none of 28 choices. It has order pp-dp; schedule 1f1b, interleaved, "
            "interleaved-zb, zb-v, dualpipe-v; recompute none, full; offload none; context "
            "strategy all-gather; precision bf16, fp32. Fix less of the layout, or one of these.\n",
        ),
    ],
)
def test_what_cannot_be_offloaded(
    capsys: pytest.CaptureFixture[str], argv: list[str], code: int, message: str
) -> None:
    assert run(capsys, *argv, "--quiet") == (code, "", message)


def test_a_run_keeps_all_on_the_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('name = "x"\n')
    assert run(capsys, "plan", str(file), "--offload", "optimizer", "--quiet") == (
        2,
        "",
        f"{file} is planned by its own keys on this machine, and --offload describes a model on a "
        f"cluster. Give keys instead, as in --layout.tp 2.\n",
    )
