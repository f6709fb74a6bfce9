"""``equipoise plan --requests``: a table, a document, and what it refuses."""

import json
from pathlib import Path

import pytest

from support.verbs import plan, run

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
    return [f"--requests={trace}", "--model=llama3-8b", "--cluster=h100-sxm:2", *more]


def test_a_table_of_the_best_and_the_command_that_simulates_it(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    code, out, _ = plan(capsys, *asked(trace, "--slo", "ttft=0.5,tpot=0.02"))
    assert code == 0
    head, counted, *table = out.splitlines()
    assert head.startswith("tp=2: ") and "100.0% met their objectives" in head
    assert counted.startswith("5 choices; ") and counted.endswith("None of the others is better.")
    assert [line.split()[0] for line in table[1:4]] == ["1", "2", "3"]
    assert any("dp=1 + dp=1 to generate" in line for line in table)
    command = table[-1].removeprefix("Simulate the best: equipoise ")
    code, out, _ = run(capsys, *command.split())
    assert code == 0 and "100.0% met their objectives" in out
    code, out, err = plan(capsys, *asked(trace, "--quiet"))
    assert (code, len(out.splitlines()), err) == (0, 1, "")


def test_a_document(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    code, out, err = plan(capsys, *asked(trace, "--layout=cp=1", "--fair=vtc", "--json"))
    row = json.loads(out)
    assert (code, err) == (0, "")
    assert row["best"]["flags"] == "--layout tp=2" and row["best"]["price"]["policy"] == "vtc"
    assert row["listed"] == row["unfit"] + row["left_out"] + row["simulated"]
    assert row["is_whole"] and row["gap"] == pytest.approx(0.0)
    assert row["best"]["latency_s"] <= row["runners_up"][0]["latency_s"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--recompute=full"],
            "--recompute describes a step to train and changes nothing for --requests. Leave it "
            "out.",
        ),
        (
            ["--out=plans"],
            "--out describes a step to train and changes nothing for --requests. Leave it out.",
        ),
        (["--seconds=0"], "seconds is 0. Give a time above 0."),
        (
            ["--slo", "c:ttft=1"],
            'An objective is for tenant "c", and the trace has no request of theirs. Nearest: a.',
        ),
    ],
)
def test_what_says_nothing_about_serving_is_refused(
    capsys: pytest.CaptureFixture[str], trace: Path, more: list[str], message: str
) -> None:
    code, out, err = plan(capsys, *asked(trace, *more))
    assert (code, out, err.strip()) == (2, "", message)


def test_it_says_what_it_needs(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    code, _, err = plan(capsys, f"--requests={trace}")
    assert (code, err.strip()) == (
        2,
        "--requests needs --model and --cluster. Say what serves the trace, and on which devices.",
    )
    code, _, err = plan(capsys, "--model=llama3-8b", "--cluster=h100-sxm:2", "--fair=vtc")
    assert (code, err.strip()) == (2, "--fair needs --requests. Give both or neither.")


def test_what_does_not_fit_ends_with_its_own_code(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    code, out, err = plan(
        capsys, f"--requests={trace}", "--model=llama3-70b", "--cluster=h100-sxm:1", "--quiet"
    )
    assert (code, out) == (3, "")
    assert err.startswith("None of 1 layouts can be served. The first of them: Weights of 131.4")
