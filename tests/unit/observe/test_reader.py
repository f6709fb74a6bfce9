import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.base.errors import DataError, SpecError
from equipoise.dash.summary import steady_steps
from equipoise.observe.event import seal
from equipoise.observe.reader import read_run
from support.journals import write_run

Event = dict[str, Any]


def start(t: float = 100.0, *, world: int = 2, resumed_step: int = 0, **more: Any) -> Event:
    return {
        "v": 1, "kind": "instant", "name": "start", "t": t, "rank": 0, "version": "0.1.0",
        "spec": {"name": "demo", "pack": {"policy": "by-work"}},
        "origins": {"pack.policy": "run.toml:2"}, "model": {"layers": 2},
        "environment": {"python": "3.11"}, "world": world, "resumed_step": resumed_step,
        "corpus": {"documents": 3}, "curve": {"ns_per_token": 5.0}, **more,
    }  # fmt: skip


def scalar(step: int, rank: int = 0, *, t: float = 0.0, loss: float | None = 4.0) -> Event:
    return {
        "v": 1, "kind": "scalar", "name": "step", "t": t or 100.0 + step, "rank": rank,
        "step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64,
        "tokens_seen": 64 * step, "step_s": 0.5, "tokens_per_s": 128.0, "mfu": 0.25,
        "busy_s": 0.4 - 0.1 * rank, "wait_s": 0.1 * rank, "predicted_s": 0.38,
        "predicted_step_s": 0.45, "memory_bytes": 1000, "peak_memory_bytes": 2000 + rank,
    }  # fmt: skip


def pack(step: int) -> Event:
    return {
        "v": 1, "kind": "decision", "name": "pack", "t": 100.0 + step, "rank": 0, "step": step,
        "policy": "by-work", "plan_s": 0.001, "rank_tokens": [40, 24], "rank_documents": [1, 3],
        "rank_flop": [2e9, 2e9], "predicted_s": [0.39, 0.37], "predicted_step_s": 0.45,
        "in_order_predicted_s": [0.5, 0.26], "skew": 1.03, "in_order_skew": 1.32,
        "micro_batches": [1, 2], "digest": "ab",
    }  # fmt: skip


def span(name: str, step: int, t: float, duration_s: float = 0.1, **more: Any) -> Event:
    return {
        "v": 1, "kind": "span", "name": name, "t": t, "rank": 0, "duration_s": duration_s,
        "step": step, **more,
    }  # fmt: skip


def write(folder: Path, *ranks: list[Event], tail: str = "") -> Path:
    (folder / "journal").mkdir(parents=True, exist_ok=True)
    for rank, events in enumerate(ranks):
        text = "".join(json.dumps(event) + "\n" for event in events) + tail
        (folder / "journal" / f"rank-{rank:05d}.jsonl").write_text(text)
    return folder


def message(kind: type[Exception], folder: Path) -> str:
    with pytest.raises(kind) as caught:
        read_run(folder)
    return str(caught.value)


def test_columns_and_what_is_not_known(tmp_path: Path) -> None:
    memory = {
        "v": 1, "kind": "decision", "name": "memory", "t": 100.5, "rank": 0,
        "forecast_bytes": 3000, "terms": {"weights": 1000, "activations": 2000},
    }  # fmt: skip
    stop = {
        "v": 1, "kind": "instant", "name": "stop", "t": 110.0, "rank": 0, "reason": "done",
        "step": 2,
    }  # fmt: skip
    fault = {
        "v": 1, "kind": "fault", "name": "nan-loss", "t": 103.0, "rank": 1, "step": 2,
        "message": "The loss is NaN.",
    }  # fmt: skip
    unknown = {"v": 1, "kind": "rumour", "name": "later", "t": 1.0, "rank": 0}
    record = read_run(
        write(
            tmp_path,
            [start(), memory, pack(1), scalar(1), pack(2), scalar(2, loss=None), unknown, stop],
            [scalar(1, 1), fault],
        )
    )
    assert record.ranks == 2 and record.start.policy == "by-work"
    assert record.start.origins == {"pack.policy": "run.toml:2"}
    assert record.step.tolist() == [1, 2]
    assert record.loss[0] == 4.0 and np.isnan(record.loss[1])
    assert record.tokens_seen.tolist() == [64, 128]
    assert record.busy_s[0].tolist() == pytest.approx([0.4, 0.3])
    assert record.busy_s[1, 0] == 0.4 and np.isnan(record.busy_s[1, 1])  # rank 1 is behind
    assert record.predicted_s.tolist() == [[0.39, 0.37]] * 2
    assert record.in_order_predicted_s[1].tolist() == [0.5, 0.26]
    assert record.rank_documents[0].tolist() == [1, 3]
    assert record.micro_batches[0].tolist() == [1, 2]
    assert record.peak_memory_bytes[0].tolist() == [2000, 2001]
    assert record.memory is not None and record.memory.terms["activations"] == 2000
    assert record.stop is not None and (record.stop.reason, record.stop.step) == ("done", 2)
    assert [(each.rank, each.name, each.step) for each in record.faults] == [(1, "nan-loss", 2)]
    assert record.torn_lines == 0


def test_without_packs_the_ranks_own_prediction_stands_in(tmp_path: Path) -> None:
    record = read_run(write(tmp_path, [start(), scalar(1)], [scalar(1, 1)]))
    assert record.predicted_s.tolist() == [[0.38, 0.38]]
    alike = read_run(write(tmp_path, [start(), pack(1) | {"micro_batches": 3}, scalar(1)], []))
    assert alike.micro_batches.tolist() == [[3, 3]]  # one number for all ranks
    assert np.isnan(record.skew).all() and record.memory is None and record.stop is None


def test_spans_in_order_of_start(tmp_path: Path) -> None:
    events = [
        start(),
        span("backward", 1, 101.2, micro_batch=0),
        span("forward", 1, 101.0, 0.2, micro_batch=0),
        span("reduce", 1, 101.3),
        scalar(1),
    ]
    spans = read_run(write(tmp_path, events, [])).spans
    assert [spans[0].names[index] for index in spans[0].name] == ["forward", "backward", "reduce"]
    assert spans[0].t.tolist() == [101.0, 101.2, 101.3]
    assert spans[0].duration_s.tolist() == [0.2, 0.1, 0.1]
    assert spans[0].micro_batch[0] == 0 and np.isnan(spans[0].micro_batch[2])
    assert spans[1].name.size == 0


def test_a_resumed_step_is_shown_as_done_last(tmp_path: Path) -> None:
    stop = {
        "v": 1, "kind": "instant", "name": "stop", "t": 104.0, "rank": 0,
        "reason": "interrupted", "step": 3,
    }  # fmt: skip
    first = [start(), *(each for step in (1, 2, 3) for each in (
        span("forward", step, 100.0 + step), span("forward", step, 100.4 + step, micro_batch=1),
        scalar(step),
    )), stop]  # fmt: skip
    second = [
        start(200.0, resumed_step=1),
        span("load", 1, 200.5),
        span("forward", 2, 202.0),
        scalar(2, t=202.5, loss=3.5),
    ]
    record = read_run(write(tmp_path, first + second, []))
    assert record.resumed_steps == (0, 1) and record.start.resumed_step == 1
    assert record.step.tolist() == [1, 2, 3] and record.loss.tolist() == [4.0, 3.5, 4.0]
    assert record.stop is None  # undone by resuming
    spans = record.spans[0]
    told = [(spans.names[name], step) for name, step in zip(spans.name, spans.step, strict=True)]
    # Step 2's two spans of the first session are gone; loading at step 1 leaves step 1 alone.
    assert told == [
        ("forward", 1), ("forward", 1), ("forward", 3), ("forward", 3), ("load", 1), ("forward", 2),
    ]  # fmt: skip


def stop(t: float, step: int, reason: str = "done") -> Event:
    return {
        "v": 1, "kind": "instant", "name": "stop", "t": t, "rank": 0, "reason": reason,
        "step": step,
    }  # fmt: skip


def test_a_clock_set_back_within_a_run_hides_no_stop(tmp_path: Path) -> None:
    events = [start(1000.0), scalar(1, t=1001.0), scalar(2, t=502.0), stop(503.0, 2)]
    record = read_run(write(tmp_path, events))
    assert record.stop is not None and (record.stop.reason, record.stop.step) == ("done", 2)
    assert record.step.tolist() == [1, 2]


def test_a_clock_set_back_between_sessions_hides_neither_of_them(tmp_path: Path) -> None:
    first = [
        start(1000.0),
        scalar(1, t=1001.0),
        scalar(2, t=1002.0),
        stop(1003.0, 2, "interrupted"),
    ]
    second = [start(500.0, resumed_step=2), scalar(3, t=501.0)]
    going_on = read_run(write(tmp_path / "going-on", first + second))
    assert going_on.stop is None  # undone by resuming, though its time is later
    assert going_on.resumed_steps == (0, 2)
    assert np.flatnonzero(~steady_steps(going_on)).tolist() == [0, 2]
    ended = read_run(write(tmp_path / "ended", [*first, *second, stop(502.0, 3)]))
    assert ended.stop is not None and (ended.stop.reason, ended.stop.step) == ("done", 3)


@pytest.mark.parametrize("shift", [0.0, -600.0, 600.0])
def test_spans_that_were_done_again_are_told_apart_without_a_clock(
    tmp_path: Path, shift: float
) -> None:
    def session(t: float, steps: range, *before: Event) -> list[Event]:
        spans = [span("forward", step, t + step, duration_s=t) for step in steps]
        return [span("measure", 0, t) | {"step": None}, *before, *spans]

    first = session(1000.0, range(1, 4))
    second = session(1100.0 + shift, range(3, 5), span("load", 2, 1100.0 + shift))
    killed_in_step_1 = session(1000.0, range(1, 2))
    again = session(1100.0 + shift, range(1, 3))
    for name, events, kept in (
        (
            "resumed",
            first + second,
            [(1, 1000.0), (2, 1000.0), (3, 1100 + shift), (4, 1100 + shift)],
        ),
        ("from the start", killed_in_step_1 + again, [(1, 1100.0 + shift), (2, 1100.0 + shift)]),
    ):
        spans = read_run(write(tmp_path / name, [start()], events)).spans[1]
        forward = spans.name == spans.names.index("forward")
        found = zip(spans.step[forward].tolist(), spans.duration_s[forward].tolist(), strict=True)
        assert list(found) == kept


def test_every_prefix_reads(tmp_path: Path) -> None:
    events = [start(), pack(1), span("forward", 1, 101.0), scalar(1), scalar(2)]
    write(tmp_path, events, [])
    path = tmp_path / "journal" / "rank-00000.jsonl"
    whole = path.read_bytes()
    ends = np.cumsum([len(line) for line in whole.splitlines(keepends=True)])
    for cut in range(int(ends[0]), len(whole) + 1, 3):
        path.write_bytes(whole[:cut])
        record = read_run(tmp_path)
        at_least = int((ends[3:] <= cut).sum())
        assert at_least <= record.step.size <= at_least + 1  # the newline itself may be torn off
        assert record.torn_lines <= 1


def test_a_torn_line_with_another_appended_loses_only_itself(tmp_path: Path) -> None:
    write(tmp_path, [start(), scalar(1)], [])
    path = tmp_path / "journal" / "rank-00000.jsonl"
    torn = json.dumps(scalar(2))[:40]
    path.write_text(path.read_text() + torn + json.dumps(scalar(3)) + "\n" + torn + "\n")
    record = read_run(tmp_path)
    assert record.step.tolist() == [1, 3] and record.torn_lines == 2


def test_no_such_folder(tmp_path: Path) -> None:
    assert message(SpecError, tmp_path / "gone") == (
        f"No such folder: {tmp_path}/gone. Give the folder of a run, which `equipoise train` "
        "wrote, with journal/ inside it."
    )


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    assert message(DataError, tmp_path) == (
        f"{tmp_path} has no journal/rank-00000.jsonl: not a run. Give the folder that "
        "`equipoise train` wrote."
    )
    write(tmp_path / "a", [start()])
    write(tmp_path / "b", [start()])
    assert message(DataError, tmp_path) == (
        f"{tmp_path} has no journal/rank-00000.jsonl: not a run. Runs inside it: "
        f"{tmp_path}/a, {tmp_path}/b."
    )


def test_a_run_that_never_started(tmp_path: Path) -> None:
    assert message(DataError, write(tmp_path, [scalar(1)])) == (
        f"{tmp_path} has a journal but no start event, so its run ended before its first step. "
        "Start it again with `equipoise train`, then report on it."
    )


def test_a_newer_schema(tmp_path: Path) -> None:
    assert message(DataError, write(tmp_path, [start(), scalar(1) | {"v": 2}])) == (
        f"{tmp_path}/journal/rank-00000.jsonl:2 is of journal schema 2; this equipoise reads "
        "schemas up to 1. Report with the equipoise that trained the run, or a newer one."
    )


def test_a_flipped_bit_is_a_torn_line_or_changes_nothing(tmp_path: Path) -> None:
    events = [start(), *(each for step in (1, 2) for each in (pack(step), scalar(step)))]
    text = "".join(seal(json.dumps(each, separators=(",", ":"))) + "\n" for each in events)
    file = tmp_path / "journal" / "rank-00000.jsonl"
    file.parent.mkdir()
    file.write_text(text)
    whole = read_run(tmp_path)
    first_line = text.index("\n")
    torn = 0
    for at in range(0, 8 * len(text), 11):
        data = bytearray(text.encode())
        data[at // 8] ^= 1 << at % 8
        file.write_bytes(bytes(data))
        try:
            record = read_run(tmp_path)
        except DataError as error:
            assert at // 8 <= first_line
            assert str(error).startswith(f"{tmp_path} has a journal whose start event cannot be")
            continue
        torn += record.torn_lines
        for number, step in enumerate(record.step.tolist()):
            assert record.loss[number] == whole.loss[step - 1]
            assert record.lr[number] == whole.lr[step - 1]
    assert torn > 0


def test_a_damaged_start(tmp_path: Path) -> None:
    file = tmp_path / "journal" / "rank-00000.jsonl"
    file.parent.mkdir()
    file.write_text(seal(json.dumps(start())).replace("2", "3", 1) + "\n")
    with pytest.raises(DataError) as caught:
        read_run(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} has a journal whose start event cannot be read: 1 of its lines are damaged. "
        "Copy journal/rank-00000.jsonl again, or start the run again with `equipoise train`."
    )


def test_a_start_of_a_million_ranks_or_of_none(tmp_path: Path) -> None:
    file = tmp_path / "journal" / "rank-00000.jsonl"
    file.parent.mkdir()
    for world in (10**9, "4", None, -1):
        file.write_text(json.dumps(start(world=world) | {"resumed_step": "x"}) + "\n")
        assert read_run(tmp_path).ranks == 1


def test_keys_of_an_earlier_version_have_their_names_of_today(tmp_path: Path) -> None:
    spec = {"name": "demo", "layout": {"dp": 1, "context": 2}}
    begun = start(spec=spec, origins={"layout.context": "run.toml:3"})
    record = read_run(write(tmp_path, [begun]))
    assert record.start.spec == {"name": "demo", "layout": {"dp": 1, "cp": 2}}
    assert record.start.origins == {"layout.cp": "run.toml:3"}


def test_a_lost_journal_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ranks=3, steps=2)
    assert read_run(run).missing_sentence == ""
    (run / "journal" / "rank-00002.jsonl").unlink()
    assert read_run(run).missing_ranks == (2,)
    (run / "journal" / "rank-00000.jsonl").unlink()
    with pytest.raises(DataError) as first:
        read_run(run)
    assert str(first.value) == (
        f"{run} has no journal/rank-00000.jsonl, which holds its steps. Copy the whole journal "
        f"folder from where the run was written."
    )


def test_a_journal_that_is_no_file_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ranks=2, steps=2)
    journal = run / "journal" / "rank-00001.jsonl"
    journal.unlink()
    journal.mkdir()
    with pytest.raises(DataError) as folder:
        read_run(run)
    assert str(folder.value) == (
        f"{journal} is a folder, so no journal can be read from it. Put the run's journal back in "
        f"its place, or remove it."
    )
    journal.rmdir()
    os.mkfifo(journal)
    with pytest.raises(DataError) as fifo:
        read_run(run)
    assert str(fifo.value).startswith(f"{journal} is not a regular file, so no journal")
    journal.unlink()
    journal.symlink_to(journal)
    with pytest.raises(DataError) as loop:
        read_run(run)
    assert str(loop.value) == (
        f"{journal} cannot be read: Too many levels of symbolic links. Make it readable, or copy "
        f"it again from where the run was written."
    )


def test_a_folder_may_be_text(tmp_path: Path) -> None:
    folder = write(tmp_path, [start(), scalar(1)])
    assert read_run(str(folder)).folder == folder
