"""Runs that save beside their steps, as their journals tell it."""

from pathlib import Path

import pytest

from equipoise.checkpoint.manifest import find_checkpoints
from equipoise.comm.local import run_ranks
from support.make_run import MakeRun
from support.ranks import on_ranks
from support.read_run import EXACT, events


def test_a_run_that_decides_how_often_to_save_says_so(tmp_path: Path, make_run: MakeRun) -> None:
    resolved = make_run(steps=9, every_steps="auto", rank_mtbf_hours=0.002)
    ended = run_ranks(2, on_ranks.train, tmp_path, resolved, {})[0]
    straight = run_ranks(2, on_ranks.train, tmp_path / "straight", make_run(steps=9), {})[0]
    assert ended.losses == pytest.approx(straight.losses, rel=EXACT)
    begun = [event["step"] for event in events(tmp_path, "save")]
    assert begun[0] == 2 and begun[-1] == 9
    decided = events(tmp_path, "interval")
    assert [event["step"] for event in decided] == begun
    for event in decided:
        assert event["mtbf_s"] == pytest.approx(3.6)
        best = (2 * event["cost_s"] * event["mtbf_s"]) ** 0.5 / event["step_s"]
        least = event["written_s"] / event["step_s"]
        assert max(best, least) - 1 <= event["every_steps"] <= max(best, least, 1) + 1
    for one, other, event in zip(begun[:-2], begun[1:-1], decided[:-2], strict=True):
        assert other >= one + event["every_steps"]
    (said, *_) = [line for line in ended.said if line.startswith("A save costs ")]
    assert "(checkpoint.rank_mtbf_hours = 0.002, ranks: 2), so the run saves every " in said


def test_saves_at_every_step_are_journaled_with_what_they_cost(
    tmp_path: Path, make_run: MakeRun
) -> None:
    run_ranks(2, on_ranks.train, tmp_path, make_run(steps=6, every_steps=1, keep=3), {})
    names = [path.name for path in find_checkpoints(tmp_path / "checkpoint")]
    assert names == ["step-000006", "step-000005", "step-000004"]
    sizes = []
    for rank in (0, 1):
        saved = events(tmp_path, "saved", rank)
        assert [event["step"] for event in saved] == [1, 2, 3, 4, 5, 6]
        for event in saved:
            assert 0 < event["staged_s"] <= event["written_s"]
            assert event["blocked_s"] >= 0 and event["core_s"] > 0
        sizes.append(saved[0]["size_bytes"])
    newest = tmp_path / "checkpoint" / names[0]
    assert sizes == [(newest / f"shard-0000{rank}.bin").stat().st_size for rank in (0, 1)]
    assert list((tmp_path / "checkpoint").glob(".saving-*")) == []
