"""A run's spans as a trace, measured and predicted."""

import json
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from equipoise.base.errors import SpecError
from equipoise.cli.main import main
from equipoise.dash.trace import MEASURED, PREDICTED, trace_runs, typical_step
from equipoise.observe.reader import read_run


def span(name: str, rank: int, t: float, duration_s: float, **more: object) -> dict[str, object]:
    told = {"v": 1, "kind": "span", "name": name, "t": t, "rank": rank, "duration_s": duration_s}
    return told | more


def pipelined(folder: Path, journals: ModuleType) -> Path:
    """A run whose fourth step went through two stages."""
    run = journals.write_run(folder, steps=3)
    at = 1_790_000_900.0
    for rank in (0, 1):
        instructions = [
            ("forward", 0.0 + rank, 1.0, 0.5 * rank, 0.5),
            ("backward-input", 3.0 - rank, 1.5, 2.0 - 0.5 * rank, 0.75),
            ("backward-weight", 5.0 - rank, 0.5, 3.0, 0.25),
        ]
        with (run / "journal" / f"rank-{rank:05}.jsonl").open("a") as file:
            for name, begin, takes, predicted_begin, predicted in instructions:
                row = span(
                    name,
                    rank,
                    at + begin,
                    takes,
                    step=4,
                    stage=rank,
                    micro_batch=0,
                    predicted_begin_s=predicted_begin,
                    predicted_s=predicted,
                )
                file.write(json.dumps(row) + "\n")
            file.write(json.dumps(span("reduce", rank, at + 6, 0.25, step=4)) + "\n")
    return run


def test_measured_and_predicted_are_two_processes(tmp_path: Path, journals: ModuleType) -> None:
    record = read_run(pipelined(tmp_path / "run", journals))
    events = trace_runs([record], [4])
    spans = [each for each in events if each["ph"] == "X"]
    measured = [each for each in spans if each["pid"] == MEASURED]
    predicted = [each for each in spans if each["pid"] == PREDICTED]
    assert len(measured) == 2 * 4
    assert len(predicted) == 2 * 3
    first = next(each for each in measured if each["name"] == "1F0")
    assert (first["tid"], first["ts"], first["dur"]) == (1, 1e6, 1e6)
    assert first["args"] == {"step": 4, "stage": 1, "micro_batch": 0}
    promised = {each["name"]: (each["ts"], each["dur"]) for each in predicted}
    assert promised["0F0"] == (0.0, 0.5e6)
    assert promised["1I0"] == (1.5e6, 0.75e6)
    assert promised["1W0"] == (3e6, 0.25e6)
    named = {each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert named == {"measured", "predicted"}


def test_loads_are_predicted_where_ranks_are_no_stages(
    tmp_path: Path, journals: ModuleType
) -> None:
    record = read_run(journals.write_run(tmp_path / "run", steps=9))
    events = trace_runs([record], [2, 3])
    told = [each for each in events if each["ph"] == "X"]
    assert {each["args"]["step"] for each in told} == {2, 3}
    assert min(each["ts"] for each in told) == 0
    assert 2 <= typical_step(record) <= 9
    for step in (2, 3):
        row = step - 1
        loads = {
            each["tid"] % 2: each["dur"] / 1e6
            for each in told
            if each["pid"] == PREDICTED
            and each["cat"] == "compute"
            and each["args"]["step"] == step
        }
        assert loads == pytest.approx({rank: record.predicted_s[row, rank] for rank in (0, 1)})
        rests = [each for each in told if each["cat"] == "rest" and each["args"]["step"] == step]
        first = min(
            each["ts"] for each in told if each["cat"] == "forward" and each["args"]["step"] == step
        )
        whole_s = record.predicted_step_s[row]
        assert len(rests) == 2
        assert all(
            (each["ts"] + each["dur"] - first) / 1e6 == pytest.approx(whole_s) for each in rests
        )


def test_predictions_of_neighbouring_steps_never_overlap_on_a_thread(
    tmp_path: Path, journals: ModuleType
) -> None:
    run = journals.write_run(tmp_path / "run", steps=6)
    for rank in (0, 1):  # every step was predicted to take three times as long
        file = run / "journal" / f"rank-{rank:05}.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            for key in ("predicted_s", "predicted_step_s"):
                if key in line:
                    was = line[key]
                    line[key] = [3 * one for one in was] if isinstance(was, list) else 3 * was
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = trace_runs([read_run(run)], range(1, 7))
    threads = {each["tid"] for each in events if each.get("pid") == PREDICTED and "dur" in each}
    assert threads > {0, 1, 2, 3}
    for thread in threads:
        spans = sorted(
            (each["ts"], each["ts"] + each["dur"])
            for each in events
            if each["pid"] == PREDICTED and each["tid"] == thread and "dur" in each
        )
        assert all(one[1] <= other[0] + 1 for one, other in pairwise(spans))
    names = [each["args"]["name"] for each in events if each["name"] == "thread_name"]
    assert names.count("rank 1") == 2 and "rank 1, steps that overlap those above" in names


def test_the_verb_writes_into_the_run(
    tmp_path: Path, journals: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    run = pipelined(tmp_path / "run", journals)
    assert main(["trace", str(run), "--steps", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"trace": str(run / "trace/step-000004.json"), "run": str(run), "steps": [4]}
    assert json.loads(Path(told["trace"]).read_text())["displayTimeUnit"] == "ms"
    assert main(["trace", str(run), "--out", str(tmp_path / "typical.json")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/typical.json\n"


def test_what_is_not_there(
    tmp_path: Path, journals: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    run = journals.write_run(tmp_path / "run", steps=3)
    for steps, message in {
        "7": f"{run} has no span of step 7. Its steps are 1 to 3.\n",
        "5-3": '--steps "5-3" is not a step, as in 12, or a range, as in 3-5.\n',
        "two": '--steps "two" is not a step, as in 12, or a range, as in 3-5.\n',
        "1-10001": '--steps "1-10001" is 10,001 steps, which no browser shows. Give at most '
        "10,000.\n",
        "9" * 5000: f'--steps "{"9" * 23}...{"9" * 23}" (5,002 characters) is not a step, as in '
        "12, or a range, as in 3-5.\n",
        "4-99": f"{run} has no span of step 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 84 more. "
        "Its steps are 1 to 3.\n",
    }.items():
        assert main(["trace", str(run), "--steps", steps]) == 2
        assert capsys.readouterr().err == message
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main(["trace", str(run), "--out", str(blocked / "step.json")]) == 2
    assert capsys.readouterr().err == (
        f"The trace cannot be written to {blocked}/step.json: Not a directory. Give another file "
        "with --out FILE.\n"
    )
    with pytest.raises(SpecError) as refused:
        typical_step(read_run(journals.write_run(tmp_path / "empty", steps=0)))
    assert str(refused.value) == (
        f"{tmp_path}/empty has no finished step to trace. Let it train one."
    )


def test_sides_of_one_run_stand_beside_each_other(tmp_path: Path, journals: ModuleType) -> None:
    for policy in ("in-order", "divided"):
        file = journals.write_run(tmp_path / policy, policy=policy, steps=5) / "journal"
        first, *rest = (file / "rank-00000.jsonl").read_text().splitlines(keepends=True)
        begun = json.loads(first) | {
            "compared": {"policies": ["in-order", "divided"], "session": "1"}
        }
        (file / "rank-00000.jsonl").write_text("".join([json.dumps(begun) + "\n", *rest]))
    assert main(["trace", str(tmp_path), "--steps", "3"]) == 0
    events = json.loads((tmp_path / "trace/step-000003.json").read_text())["traceEvents"]
    named = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert named == {
        0: "in-order, measured",
        1: "in-order, predicted",
        2: "divided, measured",
        3: "divided, predicted",
    }
    assert min(each["ts"] for each in events if each["ph"] == "X") == 0


def test_a_lost_journal_is_named_beside_the_trace(
    tmp_path: Path, journals: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    run = journals.write_run(tmp_path / "run", steps=3)
    (run / "journal" / "rank-00001.jsonl").unlink()
    sentence = read_run(run).missing_sentence
    for verb in ("trace", "report"):
        assert main([verb, str(run)]) == 0
        assert capsys.readouterr().err == f"{sentence}\n"
    assert main(["inspect", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["journal"] == sentence
