"""A journal whose disk fills, breaks or loses it: real disks, and no line lost without a word."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from equipoise.base.disk import disk_of
from equipoise.observe import journal as journal_module
from equipoise.observe.journal import Journal, note

NO_LINE_LOST = "can be written again; 0 of its lines are lost."


def events(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path: Path) -> list[int]:
    return [event["step"] for event in events(path) if event["name"] == "step"]


def fill(disk: Path) -> Path:
    """Leave no byte of a disk free."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError:
            pass
    assert disk_of(disk).free_bytes == 0
    return filler


def write_steps(journal: Journal, first: int, last: int) -> None:
    for step in range(first, last + 1):
        journal.write("scalar", "step", step=step, padding="x" * 500)
        journal.flush()


def test_lines_wait_for_room_and_come_whole_and_in_order(mount: Callable[..., Path]) -> None:
    disk = mount(200)
    with Journal(disk / "run" / "journal", 1) as journal:
        write_steps(journal, 1, 3)
        filler = fill(disk)
        write_steps(journal, 4, 40)
        path = journal.path
        assert journal.unwritten_lines > 20
        assert journal.take_notices() == [
            f"The journal {path} cannot be written (No space left on device; the disk at {disk} "
            "has 0 B free). The run goes on; lines wait in memory until they can be written."
        ]
        assert not path.read_bytes().endswith(b"\n")  # the disk took a part of a line
        filler.unlink()
        write_steps(journal, 41, 42)
        assert journal.take_notices() == [f"The journal {path} {NO_LINE_LOST}"]
        assert journal.unwritten_lines == 0
    assert steps(path) == list(range(1, 43))
    assert [event["name"] for event in events(path) if event["kind"] == "fault"] == ["journal"]


def test_lines_beyond_what_may_wait_are_counted_where_they_are_missing(
    mount: Callable[..., Path],
) -> None:
    disk = mount(40_000)
    with Journal(disk / "journal", 0) as journal:
        write_steps(journal, 1, 1)
        filler = fill(disk)
        large = "x" * (1 << 20)
        for step in range(2, 22):
            journal.write("scalar", "step", step=step, padding=large)
            journal.flush()
        path = journal.path
        filler.unlink()
        write_steps(journal, 22, 22)
        kept = max(steps(path)[:-1]) - 1
        lost = 20 - kept
        assert 0 < kept * len(large) <= journal_module._MOST_WAITING_BYTES < (kept + 2) * len(large)
        sentence = f"The journal {path} can be written again; {lost} of its lines are lost."
        assert journal.take_notices()[1:] == [sentence]
    assert steps(path) == [1, *range(2, 2 + kept), 22]
    gap = [event for event in events(path) if "lost_lines" in event]
    assert [(event["lost_lines"], event["message"]) for event in gap] == [(lost, sentence)]


def test_a_disk_that_turns_read_only(mount: Callable[..., Path], break_disk) -> None:
    disk = mount(8192, breaks=True)
    with Journal(disk / "run" / "journal", 0) as journal:
        write_steps(journal, 1, 2)
        break_disk(disk)
        write_steps(journal, 3, 30)
        (notice,) = journal.take_notices()
        assert notice == (
            f"The journal {journal.path} cannot be written (Read-only file system; it lies on "
            f"the disk at {disk}). The run goes on; lines wait in memory until they can be written."
        )
    assert journal.unwritten_lines == 29  # and the fault's own


CHANGES = {
    "deleted": (lambda path: path.unlink(), "has vanished: it was deleted or moved away"),
    "moved": (
        lambda path: path.rename(path.with_name("old")),
        "has vanished: it was deleted or moved away",
    ),
    "its folder deleted": (
        lambda path: shutil.rmtree(path.parent),
        "has vanished: it was deleted or moved away",
    ),
    "replaced": (
        lambda path: shutil.copy(path, path.with_name("copy")).replace(path),
        "was replaced by another file",
    ),
    "emptied": (lambda path: os.truncate(path, 0), "was cut short, from 152 to 0 bytes"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_is_no_longer_there_is_begun_anew(tmp_path: Path, name: str) -> None:
    change, words = CHANGES[name]
    with Journal(tmp_path / "run" / "journal", 0) as journal:
        journal.write("scalar", "step", t=1.0, step=1, padding="x" * 58)
        journal.flush()
        assert journal.path.stat().st_size == 152
        change(journal.path)
        write_steps(journal, 2, 3)
        assert journal.take_notices() == [
            f"The journal {journal.path} {words}. The run goes on and writes a new one there."
        ]
        assert journal.begun_anew == 1
    assert steps(journal.path)[-2:] == [2, 3]


def test_a_folder_in_the_files_place_is_no_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "run" / "journal", 0) as journal:
        write_steps(journal, 1, 1)
        path = journal.path
        path.unlink()
        path.mkdir()
        write_steps(journal, 2, 3)
        assert journal.take_notices() == [
            f"The journal {path} cannot be written (It is not a regular file). The run goes on; "
            "lines wait in memory until they can be written."
        ]
        path.rmdir()
        write_steps(journal, 4, 4)
        assert journal.take_notices() == [
            f"The journal {path} has vanished: it was deleted or moved away. The run goes on and "
            "writes a new one there.",
            f"The journal {path} {NO_LINE_LOST}",
        ]
    assert steps(path) == [2, 3, 4]


def test_a_journal_does_not_bring_back_a_runs_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Journal(run / "journal", 0) as journal:
        write_steps(journal, 1, 1)
        run.rename(tmp_path / "elsewhere")
        write_steps(journal, 2, 2)
        assert journal.take_notices() == [
            f"The journal {journal.path} cannot be written (Its folder {run} has vanished). The "
            "run goes on; lines wait in memory until they can be written."
        ]
    assert not run.exists()


def test_a_note_does_not_bring_back_a_runs_folder(tmp_path: Path) -> None:
    """It would pass for another run's, and the steps of this one would be lost."""
    run = tmp_path / "run"
    note(run, 1, "instant", "late", message="a rank is late")
    assert not run.exists()
    run.mkdir()
    note(run, 1, "instant", "late", message="a rank is late")
    assert '"message":"a rank is late"' in (run / "journal" / "rank-00001.jsonl").read_text()
