"""Epochs of a run's folder: they only rise, and older ranks see that they have."""

import os
from pathlib import Path

from equipoise.observe.fence import Fence
from equipoise.observe.journal import Journal


def take(path: Path) -> Fence:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        return Fence.take(path, file)
    finally:
        os.close(file)


def test_each_taker_has_a_higher_epoch(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.touch()  # as an older version leaves it
    fences = [take(path) for _ in range(12)]
    assert [fence.epoch for fence in fences] == list(range(1, 13))
    assert [fence.is_passed for fence in fences] == [True] * 11 + [False]
    for damaged in ("nonsense", "9" * 20):
        path.write_text(damaged)
        assert not fences[0].is_passed
        assert take(path).epoch == 1
    path.unlink()
    assert not fences[0].is_passed


def test_a_journal_that_newer_ranks_write_is_left_alone(tmp_path: Path) -> None:
    fence = take(tmp_path / ".lock")
    with Journal(tmp_path / "journal", 0, fence) as journal:
        journal.write("scalar", "step", step=1)
        journal.flush()
        written = journal.path.read_bytes()
        assert written.count(b"\n") == 1
        newer = take(tmp_path / ".lock")
        for step in range(2, 400):  # more than waits for a flush
            journal.write("scalar", "step", step=step)
        journal.flush()
    assert journal.path.read_bytes() == written
    with Journal(tmp_path / "journal", 0, newer) as journal:
        journal.write("scalar", "step", step=2)
    assert journal.path.read_bytes().count(b"\n") == 2


def test_a_gang_whose_lock_was_deleted_is_passed_by_the_next_one_all_the_same(
    tmp_path: Path,
) -> None:
    """Nobody holds the new file, and its epochs begin anew."""
    run = tmp_path / "run"
    run.mkdir()
    path = run / ".lock"
    older = take(path)
    path.unlink()
    newer = take(path)
    assert (older.epoch, newer.epoch) == (1, 1)
    assert older.is_passed and not newer.is_passed
    path.write_text(f"{1:020d}")  # as an older version leaves it
    assert not older.is_passed
    # A folder that was moved away is still the older one's: what took its place is not.
    run.rename(tmp_path / "moved")
    run.mkdir()
    take(path)
    assert not older.is_passed
