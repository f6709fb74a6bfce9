"""``equipoise drill --runbook``: listed, checked, run on a folder and on a server's metrics."""

import json
from pathlib import Path

import pytest

from equipoise.cli.main import main
from equipoise.fault.runbook.record import read_records
from equipoise.fault.runbook.shipped import shipped_guides
from support.runbooks.written import WrittenRun

METRICS = """\
equipoise_time_to_first_token_seconds_bucket{{model_name="m",le="0.5"}} {fast}
equipoise_time_to_first_token_seconds_bucket{{model_name="m",le="5.0"}} 100
equipoise_time_to_first_token_seconds_bucket{{model_name="m",le="+Inf"}} 100
equipoise_time_to_first_token_seconds_sum{{model_name="m"}} 200
equipoise_inter_token_latency_seconds_bucket{{model_name="m",le="0.05"}} 900
equipoise_inter_token_latency_seconds_bucket{{model_name="m",le="+Inf"}} 900
equipoise_request_queue_time_seconds_bucket{{model_name="m",le="0.5"}} 10
equipoise_request_queue_time_seconds_bucket{{model_name="m",le="5.0"}} 100
equipoise_request_queue_time_seconds_bucket{{model_name="m",le="+Inf"}} 100
equipoise_request_prefill_time_seconds_bucket{{model_name="m",le="0.5"}} 100
equipoise_request_prefill_time_seconds_bucket{{model_name="m",le="+Inf"}} 100
equipoise_requests_waiting{{model_name="m"}} 7
equipoise_kv_cache_usage_ratio{{model_name="m"}} {usage}
equipoise_preemptions_total{{model_name="m"}} 0
equipoise_iteration_predicted_seconds_total{{model_name="m"}} 100
equipoise_iteration_measured_seconds_total{{model_name="m"}} {measured}
"""


def late_run(folder: Path) -> None:
    run = WrittenRun(folder, 2)
    run.start()
    run.steps(3)
    run.wait("instant", "late", 0, [1])
    run.wait("instant", "came", 0, [])


def test_guides_are_listed_with_their_alarms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--runbook", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["guide"] for row in rows] == [name for name, _ in shipped_guides()]
    assert {"guide": "slow-rank", "when": "instant slow", "title": "A rank is slow"} in rows


def test_without_a_run_a_guide_is_checked_and_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["drill", "--runbook", "hung-collective"]) == 0
    assert "steps, no flaw. Run it: equipoise drill --runbook" in capsys.readouterr().out
    bad = tmp_path / "bad.md"
    bad.write_text("# Bad\n## Look\n```query\nx = count of fault nothing\n```\n> {y}\n")
    assert main(["drill", "--runbook", str(bad)]) == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert lines[0].startswith(f"{bad}:4: No fault is called nothing. Nearest: ")
    assert lines[1] == f"{bad}:6: Nothing has set `y` here. Nearest: x."


def test_a_guide_runs_on_a_run_and_is_kept_in_its_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    late_run(tmp_path)
    assert main(["drill", "--runbook", "hung-collective", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["state"] == "concluded"
    assert answer["conclusions"] == [
        "Rank 1 was missing from all_gather (wait of step 9), came after 31.00 s at most, and the "
        "run went on. Nothing needs to be done, unless it happens often."
    ]
    states = {step["name"]: step["state"] for step in answer["steps"]}
    assert states["The pause is over"] == "done"
    assert states["The link"] == "skipped"
    (kept,), faults = read_records(tmp_path)
    assert (kept.guide, kept.conclusions[0], faults) == (
        "hung-collective", answer["conclusions"][0], [],
    )  # fmt: skip
    assert main(["drill", "--runbook", "hung-collective", str(tmp_path), "--quiet"]) == 0
    assert capsys.readouterr().out == f"{answer['conclusions'][0]}\n"


def test_a_healthy_run_is_unknown_and_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = WrittenRun(tmp_path, 2)
    run.start()
    run.steps(30)
    assert main(["drill", "--runbook", "hung-collective", str(tmp_path), "--quiet"]) == 0
    assert capsys.readouterr().out == (
        "Unknown: this guide explains nothing here, so it stops.\n"
        "- No rank has waited long for another.\n"
    )


@pytest.mark.parametrize(
    ("fast", "usage", "measured", "name"),
    [
        (10, 0.5, 110, "More requests than it can answer"),
        (10, 0.99, 110, "The cache is too small"),
        (10, 0.5, 200, "The machine is slow"),
        (100, 0.5, 110, ""),
    ],
)
def test_serving_is_judged_by_the_server_s_metrics(
    fast: int,
    usage: float,
    measured: int,
    name: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    page = tmp_path / "metrics.txt"
    page.write_text(METRICS.format(fast=fast, usage=usage, measured=measured))
    assert main(["drill", "--runbook", "serving-objective-missed", str(page), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    concluded = [step["name"] for step in answer["steps"] if step["conclusion"]]
    assert concluded == ([name] if name else [])
    assert answer["state"] == ("concluded" if name else "unknown")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--act"], "--act runs the commands of a guide. Name one with --runbook."),
        (
            ["--runbook", "slow-rank", "RUN", "--train.lr", "1"],
            "--runbook reads a run that was: it takes no key of run.toml.",
        ),
        (
            ["--runbook", "slow-rank", "RUN", "--only", "kill"],
            "--only, --repeat, --minutes and --out rehearse faults, and --runbook does not. Leave "
            "them out.",
        ),
        (
            ["--runbook", "slow-rank", "RUN", "--bit-flips"],
            "--runbook flips no bits: leave --bit-flips, --flips and --each-bit out.",
        ),
        (
            ["--runbook", "slow-rank", "no-such-run"],
            "No such folder: no-such-run. Give the folder of a run, which `equipoise train` wrote, "
            "with journal/ inside it.",
        ),
        (
            ["--runbook", "serving-objective-missed", "."],
            "serving-objective-missed asks a server's metrics, and . is a folder. Give the "
            "server's address, as in 127.0.0.1:8000, or a file with what it answers at /metrics.",
        ),
        (
            ["--runbook", "serving-objective-missed", "127.0.0.1:1"],
            "http://127.0.0.1:1/metrics does not answer: Connection refused.",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drill", *words]) == 2
    assert capsys.readouterr().err.strip() == sentence
