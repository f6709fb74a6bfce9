"""A rank holds its run's folder; its words are not left where others write or nothing is."""

import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.base.errors import FaultError, SpecError
from equipoise.comm.group import Ranks
from equipoise.fault import rank
from equipoise.fault.rank import FolderTakenError, RankWords, hold_folder
from equipoise.observe.fence import Fence
from equipoise.spec.run.resolved import read_resolved


class Alone(Ranks):
    """One rank without a process group."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Its own."""
        return [value]


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


def test_who_only_looks_at_a_lock_does_not_take_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another command does before it starts; and a rank that is dying holds it a little."""
    alone = Alone(0, 1, torch.device("cpu"))
    other = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_SH)
    threading.Timer(0.1, os.close, (other,)).start()
    with hold_folder(tmp_path, alone) as fence:
        assert fence.epoch == 1
        monkeypatch.setattr(rank, "_DYING_S", 0.1)
        with pytest.raises(FolderTakenError, match=r"^Another run is writing to "):
            hold_folder(tmp_path, alone).__enter__()
    with hold_folder(tmp_path, alone) as fence:
        assert fence.epoch == 2


def test_a_folder_that_is_gone_before_ranks_hold_it_is_named_whatever_was_missed(
    tmp_path: Path,
) -> None:
    folder, alone = tmp_path / "run", Alone(0, 1, torch.device("cpu"))
    words = RankWords(folder, (folder,), 0)
    gone = (
        f"The run's folder {folder} is gone, so its ranks cannot start. Put it back, then run the "
        f"same command again to resume."
    )
    with pytest.raises(FaultError) as caught, words.told():
        read_resolved(folder)
    assert str(caught.value) == gone
    with pytest.raises(FaultError) as caught, words.told(), hold_folder(folder, alone):
        pass
    assert str(caught.value) == gone
    folder.mkdir()
    with pytest.raises(SpecError, match=r"holds no readable resolved\.json"), words.told():
        read_resolved(folder)
