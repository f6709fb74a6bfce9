"""``equipoise simulate --requests``: a table, a document, and what it refuses."""

import json
from pathlib import Path

import pytest

from support.verbs import run

ROWS = [
    {"arrival_s": 0.1 * at, "tenant": "ab"[at % 2], "prompt_tokens": 400, "output_tokens": 20}
    for at in range(20)
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return file


def asked(trace: Path, *more: str) -> list[str]:
    layout = [] if any(each.startswith("--layout") for each in more) else ["--layout=tp=1,dp=2"]
    words = ["simulate", f"--requests={trace}", "--model=llama3-8b", "--cluster=h100-sxm:2"]
    return [*words, *layout, *more]


def test_a_table_with_a_row_for_each_tenant(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    code, out, _ = run(capsys, *asked(trace, "--slo", "ttft=0.5", "--slo", "b:tpot=0.0001"))
    assert code == 0
    head, *table = out.splitlines()
    assert head.startswith("llama3-8b on h100-sxm:2, tp=1,dp=2: 20 requests in ")
    assert "50.0% met their objectives" in head
    assert [line.split()[:2] for line in table[1:4]] == [["a", "10"], ["b", "10"], ["all", "20"]]
    assert any("Policy: uwfq." in line and "$" in line for line in table)
    code, out, err = run(capsys, *asked(trace, "--quiet"))
    assert (code, len(out.splitlines()), err) == (0, 1, "")


def test_a_document(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    code, out, err = run(capsys, *asked(trace, "--fair=vtc", "--json"))
    row = json.loads(out)
    assert (code, err, row["policy"], row["requests"], row["devices"]) == (0, "", "vtc", 20, 2)
    assert row["ttft_s"]["p50"] <= row["ttft_s"]["p99"]
    again = run(capsys, *asked(trace, "--fair=vtc", "--json"))
    assert again[1] == out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--recompute=full"],
            "--recompute describes a step to train and changes nothing for --requests. Leave it "
            "out.",
        ),
        (
            ["--step-sequences=4"],
            "--step-sequences describes a step to train and changes nothing for --requests. Leave "
            "it out.",
        ),
        (
            ["--fair=fair"],
            'No policy of fairness is called "fair". Nearest: job-fair. All: fifo, job-fair, '
            "user-fair, vtc, uwfq.",
        ),
        (
            ["--slo", "p99=1"],
            '--slo p99=1: "p99=1" is not an objective. Write [TENANT:]ttft=SECONDS,tpot=SECONDS, '
            "one of the two or both.",
        ),
        (
            ["--slo", "a:ttft=0"],
            '--slo a:ttft=0: "ttft=0" is not an objective. Write '
            "[TENANT:]ttft=SECONDS,tpot=SECONDS, one of the two or both.",
        ),
        (
            ["--slo", "ttft=1", "--slo", "tpot=1"],
            "--slo tpot=1: an objective is given twice. Give it once.",
        ),
        (
            ["--slo", "ab:ttft=1"],
            'An objective is for tenant "ab", and the trace has no request of theirs. Nearest: a.',
        ),
        (
            ["--layout=pp=2"],
            "layout: pp is 2, and pipeline parallelism is not priced in serving yet. Give tp and "
            "dp.",
        ),
    ],
)
def test_what_says_nothing_about_serving_is_refused(
    capsys: pytest.CaptureFixture[str], trace: Path, more: list[str], message: str
) -> None:
    code, out, err = run(capsys, *asked(trace, *more))
    assert (code, out, err.strip()) == (2, "", message)


def test_a_step_needs_its_sizes_and_no_policy(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--model=llama3-8b", "--cluster=h100-sxm:2", "--layout=dp=2"]
    code, _, err = run(capsys, *words)
    assert code == 2
    assert err.strip() == (
        "A step needs --context-tokens, --step-sequences. Give the sizes of a step, or --requests "
        "TRACE to serve one."
    )
    code, _, err = run(capsys, *words, "--context-tokens=8", "--step-sequences=2", "--fair=vtc")
    assert (code, err.strip()) == (2, "--fair needs --requests. Give both or neither.")
