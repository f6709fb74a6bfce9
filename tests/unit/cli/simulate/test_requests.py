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


def test_a_tenants_name_does_nothing_to_the_console(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    row = {"arrival_s": 0, "tenant": "\x1b[2J[/b]", "prompt_tokens": 9, "output_tokens": 2}
    file.write_text(json.dumps(row))
    code, out, _ = run(capsys, *asked(file))
    assert code == 0
    assert out.splitlines()[2].split()[:2] == ["\\x1b[2J[/b]", "1"]


def test_a_document(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    code, out, err = run(capsys, *asked(trace, "--fair=vtc", "--json"))
    row = json.loads(out)
    assert (code, err, row["policy"], row["requests"], row["devices"]) == (0, "", "vtc", 20, 2)
    assert row["ttft_s"]["p50"] <= row["ttft_s"]["p99"]
    again = run(capsys, *asked(trace, "--fair=vtc", "--json"))
    assert again[1] == out


def test_a_trace_of_which_nothing_can_be_served(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"arrival_s": 0, "prompt_tokens": 99999999, "output_tokens": 1}')
    code, out, _ = run(capsys, *asked(file, "--quiet"))
    assert (code, out) == (
        0,
        "llama3-8b on h100-sxm:2, tp=1,dp=2: 0 requests in 0.0 ms, 0 output tokens/s, TTFT none, "
        "TPOT none (median, p99).\n",
    )


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
            ["--layout=zero=3,dp=2"],
            "layout: zero divides what a training step keeps and changes nothing in serving. Leave "
            "it out.",
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


def test_prompts_apart_from_generation(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    words = ["--layout=tp=1", "--decode-layout=tp=1"]
    code, out, _ = run(capsys, *asked(trace, *words))
    assert code == 0
    assert out.startswith("llama3-8b on h100-sxm:2, tp=1 and tp=1 to generate: 20 requests in ")
    assert "Keys and values of 8,000 tokens were sent to the 1 that generate" in out
    code, out, _ = run(capsys, *asked(trace, *words, "--json"))
    row = json.loads(out)
    assert code == 0 and row["devices"] == 2 and row["sent_tokens"] == 8000
    code, _, err = run(capsys, *asked(trace, "--layout=tp=2", "--decode-layout=tp=1"))
    assert (code, err.strip()) == (
        2,
        "layout has 2 ranks that compute prompts and decode_layout 1 that generate, but there are "
        "2 devices. Give degrees whose products add up to 2.",
    )


def test_a_step_has_no_layout_of_its_own_to_generate(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--model=llama3-8b", "--cluster=h100-sxm:2", "--layout=dp=2"]
    words += ["--context-tokens=8", "--step-sequences=2", "--decode-layout=dp=1"]
    code, _, err = run(capsys, *words)
    assert (code, err.strip()) == (2, "--decode-layout needs --requests. Give both or neither.")
