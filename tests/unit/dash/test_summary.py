import dataclasses
import math
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from equipoise.base.units import format_count
from equipoise.dash.compare import RunComparison, compare_all
from equipoise.dash.figures import page_data
from equipoise.dash.findings import findings, headline
from equipoise.dash.summary import (
    find_spikes,
    labels,
    measured_busy_s,
    skew_of,
    steady_steps,
    summarize,
    uneven_share_of,
    wait_share_of,
)
from equipoise.observe.reader import read_run
from equipoise.observe.run_record import RunRecord


@pytest.fixture(scope="module")
def records(runs: dict[str, Path]) -> list[RunRecord]:
    return [read_run(runs["in-order"]), read_run(runs["by-work"])]


def summaries_of(records: list[RunRecord]) -> list:
    return [summarize(*pair) for pair in zip(records, labels(records), strict=True)]


def test_means_leave_out_the_first_step_of_each_session(records: list[RunRecord]) -> None:
    record = records[1]
    assert steady_steps(record).tolist() == [False] + [True] * 39
    again = (*record.resumed_steps, int(record.step[20]) - 1)
    resumed = dataclasses.replace(record, resumed_steps=again)
    assert np.flatnonzero(~steady_steps(resumed)).tolist() == [0, 20]
    summary = summarize(record, "by-work")
    assert summary.step_s == pytest.approx(record.step_s[1:].mean())
    assert summary.tokens_per_s == pytest.approx(record.tokens[1:].sum() / record.step_s[1:].sum())
    assert summary.predicted_skew == pytest.approx(record.skew[1:].mean())


def test_one_step_is_its_own_mean(journals: ModuleType, tmp_path: Path) -> None:
    record = read_run(journals.write_run(tmp_path / "run", steps=1))
    assert steady_steps(record).tolist() == [True]
    assert summarize(record, "run").step_s == record.step_s[0]


def test_numbers_of_a_run(records: list[RunRecord]) -> None:
    summary = summarize(records[1], "by-work")
    assert (summary.ranks, summary.steps, summary.stop, summary.faults) == (2, 40, "done", 0)
    assert summary.tokens == records[1].tokens_seen[-1]
    assert summary.loss == records[1].loss[-1]
    assert summary.peak_memory_bytes == 860_000_000 and summary.forecast_bytes == 905_000_000
    assert len(summary.busy_error) == 2
    record = records[1]
    off = np.abs(record.step_s - record.predicted_step_s)[1:] / record.step_s[1:]
    assert summary.step_error == pytest.approx(np.median(off))
    share = record.wait_s.sum(axis=1)[1:] / (2 * record.step_s[1:])
    assert summary.wait_share == pytest.approx(share.mean())


def test_the_share_of_waiting_is_that_of_its_spans(records: list[RunRecord]) -> None:
    for record in records:
        shares = []
        for spans in record.spans:
            waits = spans.name == spans.names.index("wait")
            taken = np.bincount(spans.step[waits].astype(int), spans.duration_s[waits])
            shares.append(taken[record.step] / record.step_s)
        assert summarize(record, "run").wait_share == pytest.approx(
            np.mean(shares, axis=0)[1:].mean()
        )


def test_skew_and_waiting_of_unknown_ranks() -> None:
    seconds = np.array([[1.0, 3.0], [np.nan, 2.0], [np.nan, np.nan], [0.0, 0.0]])
    np.testing.assert_equal(skew_of(seconds), [1.5, 1.0, np.nan, np.nan])
    assert skew_of(np.zeros((0, 2))).size == 0


def test_two_runs_on_the_same_documents(records: list[RunRecord]) -> None:
    (comparison,) = compare_all(records, labels(records))
    assert (comparison.baseline, comparison.label) == ("in-order", "by-work")
    assert comparison.is_same_documents and comparison.steps == 39
    assert comparison.differs_in == ("pack.policy",)
    in_order, by_work = records
    measured = in_order.step_s[1:].sum() / by_work.step_s[1:].sum()
    # The other run's prices may have been measured on a slower day: they play no part.
    slower_day = dataclasses.replace(in_order, predicted_step_s=in_order.predicted_step_s * 2)
    assert compare_all([slower_day, by_work], labels(records)) == [comparison]
    beside_s = by_work.predicted_step_s - by_work.predicted_s.max(axis=1)
    foreseen_s = by_work.in_order_predicted_s.max(axis=1) + beside_s
    predicted = foreseen_s[1:].sum() / by_work.predicted_step_s[1:].sum()
    assert comparison.measured == pytest.approx(measured)
    assert comparison.predicted == pytest.approx(predicted)
    assert headline(summaries_of(records), [comparison]) == (
        f"by-work took {1 - 1 / measured:.0%} less time per step than in-order (predicted "
        f"{1 - 1 / predicted:.0%})."
    )
    # The baseline is the in-order run wherever it stands.
    assert compare_all(records[::-1], labels(records[::-1])) == [comparison]


def test_only_the_steps_that_both_have_are_compared(records: list[RunRecord]) -> None:
    in_order, by_work = records
    fields = {
        field.name: getattr(by_work, field.name)[:10]
        for field in dataclasses.fields(by_work)
        if isinstance(getattr(by_work, field.name), np.ndarray)
    }
    short = dataclasses.replace(by_work, **fields)
    (comparison,) = compare_all([in_order, short], ["a", "b"])
    assert comparison.is_same_documents and comparison.steps == 9
    assert comparison.measured == pytest.approx(
        in_order.step_s[1:10].sum() / by_work.step_s[1:10].sum()
    )


def test_runs_on_other_documents_are_compared_by_tokens(
    records: list[RunRecord], journals: ModuleType, tmp_path: Path
) -> None:
    other = read_run(journals.write_run(tmp_path / "other", seed=1))
    both = [records[0], other]
    summaries = summaries_of(both)
    (comparison,) = compare_all(both, labels(both))
    assert not comparison.is_same_documents
    assert comparison.measured == pytest.approx(
        summaries[1].tokens_per_s / summaries[0].tokens_per_s
    )
    told = headline(summaries, [comparison])
    assert told == (
        f"by-work trained {comparison.measured - 1:.0%} more tokens a second than in-order "
        f"(predicted: {comparison.predicted - 1:.0%} more). The runs differ in pack.policy."
    )
    # One on the same documents is told first, were it the slower one.
    same = dataclasses.replace(comparison, is_same_documents=True, measured=1.01, label="mine")
    assert headline(summaries, [comparison, same]).startswith("mine took 1.0% less time per step")


def test_a_slower_run_is_called_slower(records: list[RunRecord]) -> None:
    slow = dataclasses.replace(records[1], step_s=records[0].step_s * 2)
    both = [records[0], slow]
    told = headline(summaries_of(both), compare_all(both, labels(both)))
    assert told.startswith("by-work took 100% longer per step than in-order (predicted: ")
    longer = RunComparison("in-order", "by-work", 1 / 1.01, 1 / 0.95, 9, True, ())
    assert headline([], [longer]) == (
        "by-work took 1% longer per step than in-order (predicted: 5% shorter)."
    )
    alike = dataclasses.replace(longer, measured=1.0, predicted=math.nan)
    assert headline([], [alike]) == "by-work took as long per step as in-order."


def test_headline_of_one_run(
    records: list[RunRecord], journals: ModuleType, tmp_path: Path
) -> None:
    one = summarize(records[1], "by-work")
    assert headline([one], []) == (
        f"Packed by-work, the fullest of 2 ranks works {one.skew:.2f}× the mean, predicted "
        f"{one.predicted_skew:.2f}×; in order it would be {one.in_order_skew:.2f}×."
    )
    in_order = summarize(records[0], "in-order")
    assert headline([in_order], []) == (
        f"Packed in order, the fullest of 2 ranks works {in_order.skew:.2f}× the mean, "
        f"predicted {in_order.predicted_skew:.2f}×."
    )
    alone = read_run(journals.write_run(tmp_path / "alone", ranks=1))
    (one,) = summaries_of([alone])
    assert re.fullmatch(
        r"by-work trains [\d.,k]+ tokens a second on one rank; half of its steps took what was "
        r"predicted to within [\d.]+%\.",
        headline([one], []),
    )
    blind = dataclasses.replace(
        in_order, predicted_skew=math.nan, in_order_skew=math.nan, policy="by-work"
    )
    assert headline([blind], []) == (
        f"Packed by-work, the fullest of 2 ranks works {blind.skew:.2f}× the mean."
    )
    blinder = dataclasses.replace(blind, skew=math.nan, step_error=math.nan, tokens_per_s=950.0)
    assert headline([blinder], []) == "in-order trains 950 tokens a second on 2 ranks."
    unborn = read_run(journals.write_run(tmp_path / "unborn", steps=0, stop=False))
    assert headline(summaries_of([unborn]), []) == "by-work has not finished a step yet."


def test_findings_say_each_figure_in_a_sentence(records: list[RunRecord]) -> None:
    told = findings(records, summaries_of(records))
    in_order, by_work = summaries_of(records)
    assert told["work"] == (
        f"On an average step the fullest rank works {in_order.skew:.2f}× the mean with in-order, "
        f"{by_work.skew:.2f}× with by-work."
    )
    assert told["lengths"] == (
        "The 22% of documents that are 2,048 tokens or longer hold 70% of all tokens."
    )
    assert told["memory"] == (
        "The fullest rank peaks at 820 MiB (forecast 863 MiB, +5%) with in-order, "
        "820 MiB (forecast 863 MiB, +5%) with by-work."
    )
    alone = findings(records[1:], [by_work])
    assert alone["work"] == (
        f"On an average step the fullest rank works {by_work.skew:.2f}× the mean; packed in "
        f"order it would be {by_work.in_order_skew:.2f}×."
    )
    assert not any("nan" in text for text in (told | alone).values())


def test_findings_of_a_run_without_steps(journals: ModuleType, tmp_path: Path) -> None:
    unborn = read_run(journals.write_run(tmp_path / "unborn", steps=0, stop=False))
    assert wait_share_of(unborn).size == 0
    (summary,) = summaries_of([unborn])
    assert math.isnan(summary.step_s) and summary.as_json()["step_s"] is None
    assert set(findings([unborn], [summary])) == {"lengths", "timeline"}


def test_labels_tell_runs_apart(
    records: list[RunRecord], journals: ModuleType, tmp_path: Path
) -> None:
    assert labels(records) == ["in-order", "by-work"]
    twins = [
        read_run(journals.write_run(tmp_path / "x" / "one", name="a", steps=1)),
        read_run(journals.write_run(tmp_path / "y" / "one", name="b", steps=1)),
    ]
    assert labels(twins) == ["a", "b"]
    again = read_run(journals.write_run(tmp_path / "z" / "two", name="a", steps=1))
    assert labels([twins[0], again]) == ["one", "two"]
    same = read_run(journals.write_run(tmp_path / "w" / "one", name="a", steps=1))
    assert labels([twins[0], same]) == [str(tmp_path / "x" / "one"), str(tmp_path / "w" / "one")]


def test_a_spike_of_the_loss_is_found_and_a_noisy_curve_has_none() -> None:
    rng = np.random.default_rng(3)
    for seed in range(200):
        curve = 3 + 5 * np.exp(-np.arange(300) / 40)
        noisy = curve + np.random.default_rng(seed).normal(0, 0.05, 300)
        assert find_spikes(noisy) == []
    noisy = 3 + 5 * np.exp(-np.arange(300) / 40) + rng.normal(0, 0.05, 300)
    noisy[[120, 121, 250]] += [1.0, 2.0, 0.9]
    noisy[60] = np.nan
    assert find_spikes(noisy) == [121, 250]  # neighbours are one spike, where it is highest
    assert find_spikes(np.full(100, 2.0)) == []
    assert find_spikes(np.array([1.0, 9.0, 1.0])) == []  # too few to know what is usual
    assert find_spikes(np.full(40, np.nan)) == []


def test_even_work_gives_back_no_more_than_ranks_wait(runs: dict[str, Path]) -> None:
    record = read_run(runs["in-order"])
    uneven, waits = uneven_share_of(record), wait_share_of(record)
    assert (uneven <= waits + 1e-12).all() and (uneven > 0).any()
    fullest, mean = record.busy_s.max(axis=1), record.busy_s.mean(axis=1)
    assert (uneven <= (fullest - mean) / record.step_s + 1e-12).all()


@pytest.mark.parametrize(("lost", "which"), [([1], "rank 1"), ([1, 2, 3], "ranks 1, 2, 3")])
def test_a_lost_journal_is_named_instead_of_a_skew(
    journals: ModuleType, tmp_path: Path, lost: list[int], which: str
) -> None:
    run = journals.write_run(tmp_path / "run", ranks=4, steps=12)
    for rank in lost:
        (run / "journal" / f"rank-{rank:05}.jsonl").unlink()
    record = read_run(run)
    assert record.missing_ranks == tuple(lost)
    [one] = summaries_of([record])
    assert np.isnan([one.skew, one.wait_share, one.uneven_share, one.peak_memory_bytes]).all()
    assert headline([one], []) == (
        f"by-work trains {format_count(one.tokens_per_s)} tokens a second on 4 ranks; half of its "
        f"steps took what was predicted to within {one.step_error:.1%}. The journal of {which} is "
        f"missing, so how evenly they worked is not known."
    )
    names = ", ".join(f"journal/rank-{rank:05}.jsonl" for rank in lost)
    assert page_data([record])["notes"][0] == {
        "kind": "fault",
        "text": f"by-work: {run} ran on 4 ranks and {names} {'is' if len(lost) == 1 else 'are'} "
        "missing, so how evenly its ranks worked is not known. Copy the whole journal folder from "
        "where the run was written.",
    }


def test_a_step_that_one_rank_has_not_journaled_has_no_skew(
    journals: ModuleType, tmp_path: Path
) -> None:
    run = journals.write_run(tmp_path / "run", ranks=2, steps=9, stop=False)
    file = run / "journal" / "rank-00001.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-2]))  # killed early
    busy_s = measured_busy_s(read_run(run))
    assert np.isnan(busy_s[-1]).all() and not np.isnan(busy_s[:-1]).any()
