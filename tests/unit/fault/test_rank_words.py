"""What ends a rank is journaled, but not where newer ranks write or where the folder is gone."""

import os
from pathlib import Path

import pytest

from equipoise.base.errors import FaultError
from equipoise.fault.rank import RankWords
from equipoise.observe.fence import Fence


def take(path: Path) -> Fence:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        return Fence.take(path, file)
    finally:
        os.close(file)


def fail(words: RankWords) -> None:
    with pytest.raises(FaultError), words.told():
        raise FaultError("The link is down.")


def test_ranks_whose_folder_was_taken_over_leave_no_word_in_it(tmp_path: Path) -> None:
    run, gone = tmp_path / "run", tmp_path / "gone"
    run.mkdir()
    words = RankWords(run, (run,), 1)
    words.fence = take(run / ".lock")
    fail(words)
    journal = run / "journal" / "rank-00001.jsonl"
    before = journal.read_bytes()
    assert b"The link is down." in before
    take(run / ".lock")
    fail(words)
    assert journal.read_bytes() == before
    fail(RankWords(gone, (gone,), 0))
    assert not gone.exists()
    fail(RankWords(run, (run / "by-work",), 0))  # a side of a comparison that has not begun
    assert (run / "by-work" / "journal" / "rank-00000.jsonl").is_file()
