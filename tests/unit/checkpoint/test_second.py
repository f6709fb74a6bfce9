"""The second folder's owner, and copies of what is not trusted any more."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.checkpoint import second as subject
from equipoise.checkpoint.manifest import find_checkpoints
from equipoise.checkpoint.second import OWNER, SecondFolder, take_second
from equipoise.train.saving.trust import set_aside
from support.checkpoints.sealed import write
from support.verbs import wait_until


def refusal(second: Path, run: Path) -> str:
    with pytest.raises(SpecError) as caught:
        take_second(str(second), run, run)
    return str(caught.value)


def test_an_owner_that_a_power_cut_left_empty_is_nobody_until_there_are_checkpoints(
    tmp_path: Path,
) -> None:
    run, second = tmp_path / "run", tmp_path / "second"
    second.mkdir()
    (second / OWNER).touch()
    assert take_second(str(second), run, run) == str(second)
    assert (second / OWNER).read_text() == f"{run}\n"
    (second / OWNER).write_bytes(b"")
    write(second, 1)
    unknown = (
        f"{second} has checkpoints but no file run that says of which run. Choose another folder "
        f"with --checkpoint.second_path; or if they are of {run}, write that path into "
        f"{second}/run."
    )
    assert refusal(second, run) == unknown
    (second / OWNER).unlink()  # as where another run keeps its own
    assert refusal(second, run) == unknown
    assert not (second / OWNER).exists()
    (second / OWNER).write_text(f"{run}\n")
    assert take_second(str(second), run, run) == str(second)
    (second / OWNER).write_bytes(b"\xff\xfe\n")
    assert refusal(second, run).startswith(f"{second} has the checkpoints of ")
    (second / OWNER).unlink()
    (second / OWNER).mkdir()
    assert refusal(second, run) == (
        f"The second folder {second} cannot be written (Is a directory). Choose another with "
        "--checkpoint.second_path."
    )
    with pytest.raises(SpecError) as caught:
        take_second("~nobody-of-this-name/second", run, run)
    assert str(caught.value) == (
        "--checkpoint.second_path ~nobody-of-this-name/second: there is no such user. Write the "
        "whole path of the folder."
    )


def test_a_copy_under_way_does_not_bring_back_what_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, second = tmp_path / "checkpoint", tmp_path / "second"
    second.mkdir()
    begun, go = threading.Event(), threading.Event()
    copy = subject.shutil.copyfileobj

    def wait(*arguments: object) -> None:
        begun.set()
        assert go.wait(120)
        copy(*arguments)

    monkeypatch.setattr(subject.shutil, "copyfileobj", wait)
    folder = SecondFolder(second, keep=2)
    folder.copy(write(root, 1), 1)
    assert begun.wait(120)
    folder.copy(write(root, 2), 2)  # comes next, and must not

    def go_on() -> None:
        wait_until(lambda: folder._next is None)  # what comes next is dropped
        go.set()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(go_on)
        folder.drop()
    assert [path.name for path in set_aside(second, after=0)] == ["step-000001"]
    folder.close()
    assert list(find_checkpoints(second)) == [] and folder.take_faults() == []


def test_a_copy_takes_the_place_of_what_has_its_name(tmp_path: Path) -> None:
    root, second = tmp_path / "checkpoint", tmp_path / "second"
    second.mkdir()
    (second / "step-000001").mkdir()
    folder = SecondFolder(second, keep=2)
    for step in (1, 2):
        folder.copy(write(root, step), step)
        folder.wait()
    folder.close()
    assert sorted(path.name for path in second.iterdir()) == ["step-000001", "step-000002"]
    assert folder.take_faults() == []


def test_a_copy_that_fails_oddly_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, second = tmp_path / "checkpoint", tmp_path / "second"
    second.mkdir()
    folder = SecondFolder(second, keep=2)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(subject.shutil, "copyfileobj", fail)
        folder.copy(write(root, 1), 1)
        folder.wait()
    folder.copy(write(root, 2), 2)
    folder.wait()
    folder.close()
    assert folder.take_faults() == [
        f"The checkpoint of step 1 could not be copied to {second} (MemoryError)."
    ]
    assert [path.name for path in second.iterdir()] == ["step-000002"]
