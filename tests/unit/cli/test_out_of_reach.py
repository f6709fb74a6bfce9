"""What a device, a program or a trunk cannot do, whichever verb asks for it: one sentence."""

from pathlib import Path

import pytest

from support.verbs import run

STEP = ["--model", "llama3-8b", "--context-tokens", "4096", "--step-sequences", "64"]
TRACE = '{"arrival_s": 0, "prompt_tokens": 300, "output_tokens": 10}\n'
SITES = """\
name = "two sites"
between = "ethernet-100"
trunk_gbit_per_s = 1
[[nodes]]
device = "h100-sxm"
nodes = 1
[[nodes]]
device = "a100-80"
nodes = 1
"""


def ask(folder: Path, verb: str, cluster: str, *more: str) -> list[str | Path]:
    """The words of one command on sixteen devices."""
    if verb == "serve":
        trace = folder / "trace.jsonl"
        trace.write_text(TRACE)
        model = ["--model", "llama3-8b", "--layout", "tp=8,dp=2"]
        return ["simulate", "--requests", trace, "--cluster", cluster, *model, *more]
    layout = ["--layout", "pp=4,dp=4"] if verb == "simulate" else ["--layout", "pp=4"]
    return [verb, *STEP, "--cluster", cluster, *layout, *more]


@pytest.mark.parametrize("verb", ["simulate", "plan", "serve"])
@pytest.mark.parametrize(
    ("device", "dtypes"), [("a100-80", "bf16, fp16, tf32, fp32"), ("v100-32", "fp16, fp32")]
)
def test_a_device_without_a_dtype(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str, device: str, dtypes: str
) -> None:
    words = ask(tmp_path, verb, f"{device}:16", "--precision", "fp8")
    assert run(capsys, *words) == (
        2,
        "",
        f"{device} has no fp8; it multiplies {dtypes}. Give precision bf16, which is computed in "
        "fp16 where there is no bf16, or fp32.\n",
    )


MIXED = """\
name = "mixed"
between = "ethernet-100"
[[nodes]]
device = "h20"
nodes = 1
[[nodes]]
device = "a100-80"
nodes = 1
"""


@pytest.mark.parametrize("verb", ["simulate", "plan", "serve"])
def test_every_device_of_a_cluster_needs_the_dtype(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str
) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(MIXED)
    words = ask(tmp_path, verb, str(cluster), "--precision", "fp8")
    assert run(capsys, *words) == (
        2,
        "",
        "a100-80 has no fp8; it multiplies bf16, fp16, tf32, fp32. Give precision bf16, which is "
        "computed in fp16 where there is no bf16, or fp32.\n",
    )


@pytest.mark.parametrize("skew", ["1e+300", "inf", "nan", "0.5"])
def test_a_skew_that_no_ranks_have(capsys: pytest.CaptureFixture[str], skew: str) -> None:
    layout = ["--layout", "dp=8,ep=8", "--model", "mixtral-8x7b", "--cluster", "h100-sxm:8"]
    sizes = ["--context-tokens", "4096", "--step-sequences", "8"]
    assert run(capsys, "simulate", *layout, *sizes, "--expert-skew", skew) == (
        2,
        "",
        f"expert_skew is {skew}. Give the rows of the expert rank that has most over the mean: 1 "
        "is balanced, and 1,048,576 the most.\n",
    )


PROGRAMS = [
    (
        ["--program", "megatron-core", "--schedule", "zb-h2"],
        "program megatron-core cannot run schedule zb-h2; it has 1f1b, interleaved. Give "
        "--schedule 1f1b, or another --program.",
    ),
    (
        ["--program", "hai-llm", "--schedule", "zb-h2"],
        "program hai-llm cannot run schedule zb-h2; it has dualpipe-v, 1f1b, zb-h1. Give "
        "--schedule dualpipe-v, or another --program.",
    ),
    (
        ["--program", "fsdp"],
        "program fsdp has no stages, and the layout has pp=4. Give a layout without pp, or "
        "another --program.",
    ),
    (
        ["--program", "deepspeed", "--precision", "fp8"],
        "program deepspeed cannot run precision fp8; it has bf16, fp32. Give --precision bf16, or "
        "another --program.",
    ),
    (
        ["--program", "megatron-core", "--recompute", "selective"],
        "program megatron-core cannot run recompute selective; it has none, attention, every-4, "
        "every-3, every-2, full. Give --recompute none, or another --program.",
    ),
]


@pytest.mark.parametrize("verb", ["simulate", "plan"])
@pytest.mark.parametrize(("more", "message"), PROGRAMS, ids=str)
def test_a_program_that_cannot_run_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str, more: list[str], message: str
) -> None:
    assert run(capsys, *ask(tmp_path, verb, "h100-sxm:16", *more)) == (2, "", f"{message}\n")


def test_a_program_without_stages_or_context_ranks_is_given_a_setting_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", *STEP, "--cluster", "h100-sxm:16", "--program", "fsdp"]
    for flag, value, ranks in (
        ("--schedule", "1f1b", "stages"),
        ("--context-strategy", "ring", "context ranks"),
    ):
        assert run(capsys, *words, flag, value) == (
            2,
            "",
            f"program fsdp has no {ranks}, and {flag} is {value}. Leave it out, or give another "
            "--program.\n",
        )


@pytest.mark.parametrize("verb", ["simulate", "plan", "serve"])
def test_a_trunk_narrower_than_one_message(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str
) -> None:
    sites = tmp_path / "sites.toml"
    sites.write_text(SITES)
    assert run(capsys, *ask(tmp_path, verb, str(sites))) == (
        2,
        "",
        "sites.toml:3  trunk_gbit_per_s: 1 Gb/s is narrower than one message, which leaves a node "
        'at the 100 Gb/s of between = "ethernet-100". Give 100 or more, or a slower link as '
        "between.\n",
    )
