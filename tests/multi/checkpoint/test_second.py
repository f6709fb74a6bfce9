"""Copies in a second folder: whole or absent, kept in number, and resumed from."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.checkpoint.manifest import find_checkpoints, read_manifest
from equipoise.checkpoint.second import SecondFolder, take_second
from equipoise.comm.local import run_ranks
from support.checkpoints import ranks as saving_ranks
from support.make_run import MODEL, MakeRun
from support.ranks import on_ranks
from support.read_run import EXACT, events


def names(root: Path) -> list[str]:
    return [path.name for path in find_checkpoints(root)]


def test_a_run_whose_own_checkpoints_are_lost_goes_on_from_its_copies(
    tmp_path: Path, make_run: MakeRun
) -> None:
    folder, second = tmp_path / "run", tmp_path / "second"
    take_second(str(second), tmp_path, folder)
    resolved = make_run(steps=6, every_steps=2, keep=2)
    resolved = dataclasses.replace(resolved, second_checkpoints=str(second))
    whole = run_ranks(2, on_ranks.train, folder, resolved, {})[0]
    # Of checkpoints that follow so fast only the newest must be copied.
    assert names(second)[0] == "step-000006"
    for copy in find_checkpoints(second):
        read_manifest(copy)
    newest = names(folder / "checkpoint")[0]
    own = (folder / "checkpoint" / newest / "manifest.json").read_bytes()
    assert (second / newest / "manifest.json").read_bytes() == own
    shutil.rmtree(folder / "checkpoint")
    longer = dataclasses.replace(make_run(steps=7, every_steps=2), second_checkpoints=str(second))
    again = run_ranks(2, on_ranks.train, folder, longer, {})[0]
    assert again.said[0] == f"Resuming after step 6 from {second}/step-000006."
    straight = run_ranks(2, on_ranks.train, tmp_path / "straight", make_run(steps=7), {})[0]
    assert again.losses == pytest.approx(straight.losses[6:], rel=EXACT)
    assert whole.losses == pytest.approx(straight.losses[:6], rel=EXACT)


def test_copies_are_kept_in_number_and_a_dropped_checkpoint_is_copied_still(tmp_path: Path) -> None:
    root, second = tmp_path / "checkpoint", tmp_path / "second"
    take_second(str(second), tmp_path, tmp_path)
    folder = SecondFolder(second, keep=2)
    for step in (1, 2, 3):
        run_ranks(1, on_ranks.save, root, MODEL, 1, [step])
        path = root / f"step-{step:06d}"
        folder.copy(path, step)
        shutil.rmtree(path)
        folder.wait()
    assert folder.take_faults() == []
    folder.close()
    assert names(second) == ["step-000003", "step-000002"]
    assert run_ranks(1, saving_ranks.load_newest_of, second, MODEL)[0][0] == 3


def test_a_full_second_disk_costs_the_copy_alone(
    tmp_path: Path, make_run: MakeRun, mount: Callable[..., Path]
) -> None:
    second = mount(100)
    take_second(str(second), tmp_path, tmp_path / "run")
    resolved = dataclasses.replace(make_run(steps=4, every_steps=2), second_checkpoints=str(second))
    ended = run_ranks(2, on_ranks.train, tmp_path / "run", resolved, {})[0]
    said = [line for line in ended.said if "could not be copied" in line]
    assert said and all(
        line.startswith("The checkpoint of step ")
        and f" could not be copied to {second} (No space left on device; the disk at {second} has "
        in line
        and line.endswith(" free). The run goes on.")
        for line in said
    )
    assert ended.reason == "done"
    assert names(tmp_path / "run" / "checkpoint") == ["step-000004", "step-000002"]
    assert [path.name for path in second.iterdir()] == ["run"]
    assert len(events(tmp_path / "run", "second")) == len(said)


def test_another_runs_folder_is_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert take_second("", tmp_path, one) == ""
    second = take_second("second", tmp_path, one)
    assert take_second(second, tmp_path, one) == second == str(tmp_path / "second")
    with pytest.raises(SpecError) as caught:
        take_second(second, tmp_path, other)
    assert str(caught.value) == (
        f"{second} has the checkpoints of {one}. Choose another folder with "
        f"--checkpoint.second_path; or if they are of {other}, write that path into {second}/run."
    )
    with pytest.raises(SpecError) as caught:
        take_second("one/checkpoint", tmp_path, one)
    assert str(caught.value) == (
        f"{one}/checkpoint is where the run itself keeps its checkpoints. Choose another folder "
        "with --checkpoint.second_path, on another disk."
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError) as caught:
        take_second("file/second", tmp_path, one)
    assert str(caught.value) == (
        f"The second folder {tmp_path}/file/second cannot be written (Not a directory). Choose "
        "another with --checkpoint.second_path."
    )
