"""What ``equipoise simulate`` refuses before it prices."""

from pathlib import Path

import pytest

from equipoise.cli.main import main

SMALL = (
    "simulate",
    "--model=llama3-8b",
    "--cluster=h100-sxm:16",
    "--layout=dp=16,zero=3",
    "--context-tokens=8192",
    "--step-sequences=32",
)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--context-tokens=99999999999",),
            "--context-tokens is 99999999999. Give a whole number of 1 to 2,147,483,647.",
        ),
        (
            ("--step-sequences=-16",),
            "--step-sequences is -16. Give a whole number of 1 to 1,048,576.",
        ),
        (("--micro-batch=0",), "--micro-batch is 0. Give a whole number of 1 to 1,048,576."),
        (("--seed=-1",), "--seed is -1. Give a whole number of 0 or more."),
        (
            ("--model=mixtral-8x7b", "--expert-skew=inf"),
            "--expert-skew is inf. Give the rows of the expert rank that has most over the mean: 1 "
            "is balanced.",
        ),
        (
            ("--expert-skew=2",),
            "--expert-skew 2 is of experts, and the model has none. Leave it out.",
        ),
        (
            ("--cluster=v100-32:16", "--precision=fp8"),
            "--precision fp8: v100-32 multiplies fp16, fp32 alone. Give bf16, for which fp16 "
            "stands where there is no bf16, or fp32.",
        ),
        (
            ("--restart-s=5",),
            "--restart-s 5 is of a run that fails, and nothing does. Give --mtbf-hours too, or "
            "leave --restart-s out.",
        ),
        (
            ("--checkpoint-steps=5",),
            "--checkpoint-steps 5 is of a run that fails, and nothing does. Give --mtbf-hours too, "
            "or leave --checkpoint-steps out.",
        ),
        (
            ("--context-strategy=ring",),
            "--context-strategy ring is of context ranks, and cp is 1. Give cp of 2 or more, or "
            "leave it out.",
        ),
        (
            ("--policy=by-work",),
            "--policy by-work packs documents, and there are none. Give --lengths too, or leave "
            "--policy out.",
        ),
    ],
)
def test_what_is_refused(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert main([*SMALL, *flags]) == 2
    assert capsys.readouterr().err == f"{message}\n"


def test_files_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "step.json"
    folder.mkdir()
    assert main([*SMALL, f"--trace={folder}"]) == 2
    assert capsys.readouterr().err == f"--trace {folder} is a folder. Give a file in it.\n"
    full = tmp_path / "full.json"
    full.symlink_to("/dev/full")
    assert main([*SMALL, f"--trace={full}"]) == 2
    assert capsys.readouterr().err == (
        f"{full} cannot be written: no space left on device. Choose another with --trace.\n"
    )


def test_what_is_said_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    said = "Experts are taken as balanced; --expert-skew says by how much they are not.\n"
    sparse = [*SMALL, "--model=mixtral-8x7b", "--layout=dp=16,ep=8"]
    assert main(sparse) == 0
    assert said in capsys.readouterr().out
    assert main([*sparse, "--expert-skew=1.3"]) == 0
    assert said not in capsys.readouterr().out
