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
            "context_tokens is 99999999999. Give a whole number of 1 to 2,147,483,647.",
        ),
        (
            ("--step-sequences=-16",),
            "step_sequences is -16. Give a whole number of 1 to 1,048,576.",
        ),
        (("--micro-batch=0",), "micro_batch is 0. Give a whole number of 1 to 1,048,576."),
        (("--seed=-1",), "seed is -1. Give a whole number of 0 or more."),
        (
            ("--model=mixtral-8x7b", "--expert-skew=inf"),
            "expert_skew is inf. Give the rows of the expert rank that has most over the mean: 1 "
            "is balanced, and 1,048,576 the most.",
        ),
        (
            ("--expert-skew=2",),
            "expert_skew = 2 needs a model with experts, and this one has none. Leave expert_skew "
            "out.",
        ),
        (
            ("--cluster=v100-32:16", "--precision=fp8"),
            "v100-32 has no fp8; it multiplies fp16, fp32. Give precision bf16, which is computed "
            "in fp16 where there is no bf16, or fp32.",
        ),
        (
            ("--restart-s=5",),
            "restart_s = 5 needs mtbf_hours, for without it nothing fails. Give both or neither.",
        ),
        (
            ("--checkpoint-steps=5",),
            "checkpoint_steps = 5 needs mtbf_hours, for without it nothing fails. Give both or "
            "neither.",
        ),
        (
            ("--context-strategy=ring",),
            "context_strategy = ring needs context ranks; cp = 1. Give cp of 2 or more, or leave "
            "context_strategy out.",
        ),
        (
            ("--policy=by-work",),
            "policy = by-work needs lengths, the documents that it packs. Give both or neither.",
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
    said = "Experts count as balanced; --expert-skew or --expert-loads says how they are not.\n"
    sparse = [*SMALL, "--model=mixtral-8x7b", "--layout=dp=16,ep=8"]
    assert main(sparse) == 0
    assert said in capsys.readouterr().out
    assert main([*sparse, "--expert-skew=1.3"]) == 0
    assert said not in capsys.readouterr().out
    assert main([*sparse, "--expert-loads=W2"]) == 0
    alone = capsys.readouterr().out
    assert (
        said not in alone
        and (
            "The fullest rank's rows of experts over the mean, by the ranks that share: 1.00 on 2, "
            "1.99 on 4, 4.00 on 8.\n"
        )
        in alone
    )
    assert main([*sparse, "--expert-loads=W2", "--expert-policy=exact"]) == 0
    assert "4.00 on 8; with copies 1." in capsys.readouterr().out
