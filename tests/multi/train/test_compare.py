"""Runs that compute every step under several packing policies and update once; on real ranks."""

import dataclasses
import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import FaultError
from equipoise.cli.main import main
from equipoise.comm.local import run_ranks
from equipoise.dash.compare import compare_all
from equipoise.dash.summary import labels
from equipoise.observe.reader import read_run, read_sides
from equipoise.train.request import compare
from support.make_run import MODEL, MakeRun, share_curve, write_run
from support.ranks import on_ranks
from support.ranks.on_ranks import Ended
from support.read_run import EXACT, assert_close, events

DEEP = dataclasses.replace(MODEL, layers=2)
SPARSE = dataclasses.replace(MODEL, layers=2, experts=4, top_k=2, expert_ffn=24)


def compared(make_run: MakeRun, *policies: str, **keys):
    resolved = make_run(policy=policies[0], cut="windows", lr=1e-3, **keys)
    return dataclasses.replace(resolved, compare=policies)


def run(folder: Path, resolved, **script) -> Ended:
    return run_ranks(resolved.ranks, on_ranks.train, folder, resolved, script)[0]


@pytest.mark.parametrize(
    ("policies", "keys"),
    [
        (("in-order", "divided"), {}),
        (("divided", "in-order", "by-work"), {"zero": 3}),
        (("in-order", "by-work"), {"dp": 1, "pp": 2, "model": DEEP}),
        (("by-tokens", "gangs"), {"model": SPARSE}),
    ],
)
def test_a_comparing_run_trains_what_an_ordinary_one_does(
    tmp_path: Path, make_run: MakeRun, policies, keys
) -> None:
    """Two runs on two ranks: some 4 s each."""
    resolved = compared(make_run, *policies, **keys)
    folder = tmp_path / "both"
    turns = [(tmp_path / "alone", dataclasses.replace(resolved, compare=()), {})]
    alone, both = run_ranks(2, on_ranks.train_turns, [*turns, (folder, resolved, {})])[0]
    assert_close(both, alone)
    assert (both.reason, both.pieces) == ("done", alone.pieces)
    for policy in policies:
        record = read_run(folder / policy)
        assert record.start.policy == policy
        assert record.start.origins["pack.policy"] == "--compare"
        assert record.step.tolist() == [1, 2, 3, 4, 5]
        assert record.loss == pytest.approx(both.losses, rel=EXACT)
        assert record.stop is not None and record.stop.reason == "done"
        assert {pack["policy"] for pack in events(folder / policy, "pack")} == {policy}
        # Every side meets once a step, and is updated once.
        for spans in record.spans:
            names = np.array(spans.names)[spans.name]
            for step in record.step.tolist():
                mine = spans.step == step
                assert (names[mine] == "optimizer").sum() == 1
                assert (names[mine] == "reduce").sum() == 1
    shared = [
        [event["step"] for event in events(folder / policy, "optimizer") if "is_shared" in event]
        for policy in policies
    ]
    # Sides take turns to come last and update.
    assert sorted(chain.from_iterable(shared)) == sorted(list(range(1, 6)) * (len(policies) - 1))
    assert all(shared)
    for policy in policies[1:]:
        agreement = events(folder / policy, "agreement")
        assert [event["step"] for event in agreement] == [1, 2, 3, 4, 5]
        assert max(event["loss"] for event in agreement) < EXACT
        assert max(event["grad_norm"] for event in agreement) < EXACT
    records = read_sides(folder)
    for comparison in compare_all(records, labels(records)):
        assert comparison.is_same_documents and comparison.steps == 4
        assert comparison.low <= comparison.measured <= comparison.high


def test_a_comparing_run_stops_is_killed_and_goes_on(tmp_path: Path, make_run: MakeRun) -> None:
    """Four runs on two ranks: some 10 s."""
    straight = run(tmp_path / "straight", compared(make_run, "in-order", "divided", steps=8))
    folder = tmp_path / "cut"
    parts = compared(make_run, "in-order", "divided", steps=8, every_steps=2)
    assert run(folder, parts, stop_at=3).reason == "interrupted"
    with pytest.raises(FaultError):
        run(folder, parts, kill_at=7)
    last = run(folder, parts)
    assert last.reason == "done"
    assert last.losses == pytest.approx(straight.losses[-len(last.losses) :], rel=EXACT)
    records = read_sides(folder)
    for record in records:
        assert record.step.tolist() == list(range(1, 9))
        assert len(record.resumed_steps) == 3
        assert record.loss == pytest.approx(straight.losses, rel=EXACT)
    assert records[0].start.compared == records[1].start.compared
    assert not (folder / "journal").exists()


def test_sides_that_differ_end_the_run(tmp_path: Path, make_run: MakeRun) -> None:
    """Sums in two orders do not agree to the last bit, which here they must."""
    resolved = compared(make_run, "in-order", "divided")
    with pytest.raises(FaultError) as caught:
        run_ranks(2, on_ranks.train_strictly, tmp_path / "run", resolved)
    message = str(caught.value)
    assert message.startswith(("The loss of step ", "The gradient norm of step "))
    assert " under in-order and " in message
    assert message.endswith(
        " apart, where rounding explains 0. No weight was changed. Prove the layout with "
        "`equipoise check`."
    )


def test_the_verb_and_python_compare_alike(
    texts: Path,
    cache: Path,
    priced: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Twice two ranks, by one curve: some 8 s."""
    file = write_run(tmp_path, texts, cache, steps=4, layout="dp = 2")
    text = file.read_text().replace("[pack]", '[pack]\ncut = "windows"')
    file.write_text(text)
    records = compare(file, ["in-order", "by-work"], out=share_curve(priced, tmp_path / "python"))
    assert [record.start.policy for record in records] == ["in-order", "by-work"]
    verb = share_curve(priced, tmp_path / "verb")
    flags = ["--compare", "in-order,by-work", "--out", str(verb)]
    assert main(["train", str(file), *flags, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"] == str(tmp_path / "verb") and told["step"] == 4
    assert told["loss"] == float(records[0].loss[-1])
    (row,) = told["comparisons"]
    assert (row["baseline"], row["label"], row["steps"]) == ("in-order", "by-work", 3)
    assert row["low"] <= row["measured"] <= row["high"]
    assert main(["report", str(tmp_path / "verb"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["comparisons"] == told["comparisons"]
    assert [run["policy"] for run in report["runs"]] == ["in-order", "by-work"]
    assert Path(report["report"]) == tmp_path / "verb" / "report.html"
    assert main(["train", str(file), "--out", str(tmp_path / "verb")]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path / 'verb'} holds a run that compares in-order and by-work. Go on with --compare "
        f"in-order,by-work, or choose another folder with --out.\n"
    )
    assert main(["train", str(file), *flags, "--plan", "plan.lock"]) == 2
    assert capsys.readouterr().err == (
        "A plan.lock decides the packing policy, and a comparison runs several. Give --plan or "
        "--compare.\n"
    )
