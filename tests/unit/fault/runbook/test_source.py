"""Answers from journals: NumPy's aggregates, windows, resumed steps, and lines as evidence."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.base.errors import DataError, SpecError
from equipoise.fault.runbook.query import parse_query, wanted_events
from equipoise.fault.runbook.source import Evidence, JournalSource
from equipoise.observe.journal import Journal
from support.runbooks.written import WrittenRun


def ask(folder: Path, text: str, **values: object) -> Evidence:
    query = parse_query(f"x = {text}", 1)
    return JournalSource(folder, wanted_events([query])).answer(query, values)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 10) | st.none()), min_size=1, max_size=20
    )
)
def test_aggregates_are_numpy_s(
    rows: list[tuple[int, float | None]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    journals = [Journal(folder / "journal", rank) for rank in range(3)]
    for step, (rank, value) in enumerate(rows, start=1):
        journals[rank].write("scalar", "step", t=float(step), step=step, wait_s=value)
    for journal in journals:
        journal.close()
    known = [value for _, value in rows if value is not None]
    for name, compute in (
        ("min", np.min), ("max", np.max), ("mean", np.mean), ("sum", np.sum),
        ("p50", np.median), ("p99", lambda each: np.percentile(each, 99)),
    ):  # fmt: skip
        answer = ask(folder, f"{name} wait_s of scalar step")
        if not known:
            assert answer.value is None
        else:
            assert answer.value == pytest.approx(float(compute(known)))
        assert answer.events == len(rows)
    assert ask(folder, "count of scalar step").value == len(rows)
    by_rank = ask(folder, "count of scalar step by rank").value
    assert by_rank == {
        rank: sum(1 for each, _ in rows if each == rank) for rank in sorted({r for r, _ in rows})
    }


def test_the_line_that_decides_is_named(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", 0) as journal:
        for step, value in enumerate((1.0, 9.0, 3.0), start=1):
            journal.write("scalar", "step", step=step, wait_s=value)
    assert ask(tmp_path, "max wait_s of scalar step").lines == ("journal/rank-00000.jsonl:2",)
    assert ask(tmp_path, "last wait_s of scalar step").lines == ("journal/rank-00000.jsonl:3",)
    lines = ask(tmp_path, "count of scalar step").lines
    assert lines == ("journal/rank-00000.jsonl:1", "journal/rank-00000.jsonl:3")


def test_a_step_that_was_computed_twice_counts_once_and_its_later_line_counts(
    tmp_path: Path,
) -> None:
    run = WrittenRun(tmp_path, 2)
    run.start()
    run.steps(4)
    run.step = 2
    run.start()
    run.steps(4, lambda rank, step: {"wait_s": 5.0 + rank})
    assert ask(tmp_path, "count of scalar step where rank == 0").value == 6
    assert ask(tmp_path, "max wait_s of scalar step where step <= 2").value == 0.06
    assert ask(tmp_path, "min wait_s of scalar step where step > 2 by rank").value == {0: 5, 1: 6}
    assert ask(tmp_path, "count of span wait").value == 12
    assert ask(tmp_path, "count of instant start").value == 2


def test_windows_end_at_the_newest_line_and_not_now(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", 0) as journal:
        for step in range(1, 101):
            journal.write("scalar", "step", t=1000.0 + 60 * step, step=step, wait_s=float(step))
        journal.write("instant", "late", t=1000.0 + 60 * 100, waiting_rank=0)
    assert ask(tmp_path, "min wait_s of scalar step over last 10 steps").value == 91
    assert ask(tmp_path, "count of scalar step over last 10 min").value == 10
    assert ask(tmp_path, "count of scalar step over last 600 s").value == 10
    assert ask(tmp_path, "count of scalar step over last 1 h").value == 60
    assert ask(tmp_path, "rate of scalar step over last 1 h").value == pytest.approx(1 / 60)
    assert ask(tmp_path, "rate of scalar step").value == pytest.approx(100 / (99 * 60))
    assert ask(tmp_path, "count of instant late over last 2 min").value == 1


def test_conditions_see_values_set_before_and_fields_of_the_event(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, 3)
    run.start()
    run.steps(5)
    assert ask(tmp_path, "count of scalar step where rank == who", who=2).value == 5
    assert ask(tmp_path, "count of scalar step where rank == who", who=None).value == 0
    assert ask(tmp_path, "last spec.train.lr of instant start").value == 3e-3
    assert ask(tmp_path, "last spec.train.nothing of instant start").value is None
    assert ask(tmp_path, "last policy of decision pack").value == "by-work"


def test_lists_group_under_each_of_their_values(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, 3)
    run.start()
    run.wait("instant", "late", 0, [1, 2])
    run.wait("instant", "late", 0, [2])
    assert ask(tmp_path, "count of instant late by culprits").value == {1: 1.0, 2: 2.0}
    assert ask(tmp_path, "last culprits of instant late").value == [2]


def test_torn_and_changed_lines_are_left_out(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, 1)
    run.start()
    run.steps(3)
    path = tmp_path / "journal" / "rank-00000.jsonl"
    text = path.read_text().replace('"wait_s":0.06', '"wait_s":9.99', 1)
    path.write_text(text + '{"v":1,"kind":"scalar"')
    query = parse_query("x = max wait_s of scalar step", 1)
    source = JournalSource(tmp_path, wanted_events([query]))
    assert source.answer(query, {}).value == 0.06
    assert source.torn_lines == 2


def test_what_is_no_run_is_refused_and_a_newer_journal_too(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as missing:
        JournalSource(tmp_path / "no", [])
    assert str(missing.value) == (
        f"No such folder: {tmp_path / 'no'}. Give the folder of a run, which `equipoise train` "
        f"wrote, with journal/ inside it."
    )
    (tmp_path / "journal").mkdir()
    line = json.dumps({"v": 9, "kind": "scalar", "name": "step"})
    (tmp_path / "journal" / "rank-00000.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match="journal schema 9"):
        JournalSource(tmp_path, [])
