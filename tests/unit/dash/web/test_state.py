import json
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from equipoise.dash.web.cards import card, events
from equipoise.dash.web.follow import Follower
from equipoise.dash.web.state import State, state_of


def look(folder: Path) -> tuple[Follower, State]:
    follower = Follower(folder)
    follower.advance(time.monotonic() + 60)
    record = follower.record() if follower.journals[0].starts else None
    return follower, state_of(follower, record)


def append(folder: Path, rank: int, **event: Any) -> None:
    with (folder / "journal" / f"rank-{rank:05d}.jsonl").open("a") as file:
        file.write(json.dumps({"v": 1, "t": 1.795e9, "rank": rank, **event}) + "\n")


def age(folder: Path, seconds: float) -> None:
    for path in (folder / "journal").iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


def test_a_run_with_a_stop_is_finished_or_interrupted(journals: ModuleType, tmp_path: Path) -> None:
    folder = journals.write_run(tmp_path / "run", steps=20)
    assert look(folder)[1] == State("finished", "Finished after step 20.")
    open_ended = journals.write_run(tmp_path / "open", steps=20, stop=False)
    assert look(open_ended)[1] == State("running", "")
    append(open_ended, 0, kind="instant", name="stop", reason="interrupted", step=20)
    assert look(open_ended)[1] == State("interrupted", "Interrupted after step 20.")


def test_a_rank_that_ended_by_a_fault_ends_the_run_until_it_is_resumed(
    journals: ModuleType, tmp_path: Path
) -> None:
    folder = journals.write_run(tmp_path / "run", steps=20, stop=False)
    append(folder, 1, kind="fault", name="save", step=20, message="No room.")
    assert look(folder)[1].kind == "running"
    append(folder, 1, kind="fault", name="error", message="The loss is NaN.\nMore.")
    assert look(folder)[1] == State("fault", "Rank 1 ended after step 20: The loss is NaN.")
    # Rank 1's line may be read after rank 0's start.
    start = journals.start_event("by-work", 2, 40, 1.8e9, "x") | {"resumed_step": 20}
    append(folder, 0, **{key: value for key, value in start.items() if key not in ("v", "rank")})
    assert look(folder)[1].kind == "running"


@pytest.mark.parametrize(
    ("quiet_s", "kind"), [(60, "running"), (-3_600, "running"), (400, "silent")]
)
def test_a_run_without_an_end_that_writes_nothing_is_silent(
    journals: ModuleType, tmp_path: Path, quiet_s: float, kind: str
) -> None:
    folder = journals.write_run(tmp_path / "run", steps=20, stop=False)
    age(folder, quiet_s)
    state = look(folder)[1]
    assert state.kind == kind
    if kind == "silent":
        assert state.sentence == (
            "Nothing was written for 6 min, and it has no end: it was killed, or hangs."
        )


def test_a_run_that_grows_is_running_whatever_its_clock_says(
    journals: ModuleType, tmp_path: Path
) -> None:
    folder = journals.write_run(tmp_path / "run", steps=20, stop=False)
    follower, _ = look(folder)
    append(folder, 0, kind="scalar", name="step", step=21, loss=3.0, step_s=1.0)
    age(folder, 86_400)
    follower.advance(time.monotonic() + 60)
    assert state_of(follower, follower.record()).kind == "running"


def test_before_the_first_step_it_may_take_its_time(journals: ModuleType, tmp_path: Path) -> None:
    folder = journals.write_run(tmp_path / "run", steps=0, stop=False)
    age(folder, 400)
    assert look(folder)[1] == State("running", "Before its first step.")
    age(folder, 700)
    assert look(folder)[1].kind == "silent"


def test_a_card_says_the_newest_numbers_and_what_is_left(
    journals: ModuleType, tmp_path: Path
) -> None:
    folder = journals.write_run(tmp_path / "run", steps=40, stop=False)
    path = folder / "journal" / "rank-00000.jsonl"
    path.write_text(path.read_text().replace('"steps": 40', '"steps": 100', 1))
    follower, state = look(folder)
    record = follower.record()
    row = card(follower, record, state, "run")
    assert (row["step"], row["steps"], row["state"]) == (40, 100, "running")
    assert row["loss"] == record.loss[-1]
    assert row["left_s"] == pytest.approx(60 * row["step_s"])
    assert min(record.step_s[-16:]) <= row["step_s"] <= max(record.step_s[-16:])
    assert row["sentence"].startswith("Packed by-work, the fullest of 2 ranks works ")
    assert len(row["spark"]["y"]) == 40
    assert json.dumps(row, allow_nan=False)


def test_events_stand_in_order_with_their_place_on_the_loss(
    journals: ModuleType, tmp_path: Path
) -> None:
    folder = journals.write_run(tmp_path / "run", steps=20)
    append(folder, 0, kind="scalar", name="eval", step=10, loss=3.5)
    append(folder, 1, kind="fault", name="save", step=15, message="No room.\nAt all.")
    record = look(folder)[0].record()
    rows = events(record)
    assert [(row["kind"], row["step"], row["text"]) for row in rows] == [
        ("start", 0, "Started."),
        ("evaluation", 10, "Held-out loss 3.500."),
        ("fault", 15, "save on rank 1: No room."),
        ("stop", 20, "Finished."),
    ]
    assert [row["tokens"] for row in rows] == [
        0.0, record.tokens_seen[9], record.tokens_seen[14], record.tokens_seen[19]
    ]  # fmt: skip
