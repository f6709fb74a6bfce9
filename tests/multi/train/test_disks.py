"""Runs whose disk fills or breaks, or whose folder goes: real disks under real ranks."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from equipoise.base.errors import CheckpointError, EquipoiseError, FaultError
from equipoise.checkpoint.manifest import find_checkpoints, read_manifest
from equipoise.comm.local import run_ranks
from equipoise.observe.reader import read_run
from support.make_run import MakeRun, share_curve, write_run
from support.ranks import on_ranks
from support.ranks.on_ranks import Ended
from support.read_run import EXACT, events
from support.verbs import train_while, wait_until

Mount = Callable[..., Path]


def run(folder: Path, resolved, **script) -> Ended:
    return run_ranks(resolved.ranks, on_ranks.train, folder, resolved, script)[0]


def fault_of(kind: type[EquipoiseError], folder: Path, resolved, **script) -> str:
    with pytest.raises(kind) as caught:
        run(folder, resolved, **script)
    return str(caught.value)


def losses(folder: Path, rank: int = 0) -> list[float]:
    return [event["loss"] for event in events(folder, "step", rank)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, store) -> list[float]:
    """Losses of 12 steps that nobody disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    return run(folder, MakeRun(store)(steps=12, every_steps=4, lr=1e-2)).losses


@pytest.fixture
def resolved(make_run: MakeRun):
    return make_run(steps=12, every_steps=4, lr=1e-2)


def checkpoints(folder: Path) -> list[str]:
    return [path.name for path in find_checkpoints(folder / "checkpoint")]


def fill(disk: Path, *, leave: int = 0) -> None:
    """Fill a disk up, but for ``leave`` bytes."""
    facts = os.statvfs(disk)
    with (disk / "filler").open("ab", buffering=0) as file:
        left = facts.f_bavail * facts.f_frsize - leave
        try:
            while left > 0:
                left -= file.write(bytes(min(4096, left)))
        except OSError:
            pass


def free(disk: Path) -> None:
    (disk / "filler").unlink()


def once_saved(folder: Path, step: int, deed: Callable[[], object]) -> None:
    """A deed once a checkpoint is there, which is written while the next steps are trained."""
    wait_until((folder / "checkpoint" / f"step-{step:06}").exists)
    deed()


# A disk that others fill. --------------------------------------------------------------------


def test_a_disk_that_is_freed_again_costs_no_line_and_no_step(
    mount: Mount, resolved, straight
) -> None:
    disk = mount(4000)
    folder = disk / "run"
    ended = run(
        folder,
        resolved,
        deed_at=2,
        deed=partial(fill, disk),
        undo=partial(free, disk),
        undo_at="rank-00001.jsonl cannot be written",
    )
    assert (ended.reason, ended.losses) == ("done", pytest.approx(straight, rel=EXACT))
    (short,) = [line for line in ended.said if "as soon as" in line]
    assert short.startswith("The next checkpoint needs ")
    assert f" and the disk at {disk} has 0 B free; none is kept yet. Free " in short
    assert short.endswith(" The run goes on, and saves as soon as there is room.")
    journal = f"The journal {folder}/journal/rank-00001.jsonl"
    assert [line for line in ended.said if line.startswith(journal)] == [
        f"{journal} cannot be written (No space left on device; the disk at {disk} has 0 B free). "
        "The run goes on; lines wait in memory until they can be written.",
        f"{journal} can be written again; 0 of its lines are lost.",
    ]
    for rank in (0, 1):
        assert losses(folder, rank) == pytest.approx(straight, rel=EXACT)
    assert len([line for line in ended.said if "could not be written" in line]) <= 1
    assert read_run(folder).stop.reason == "done"
    assert checkpoints(folder) == ["step-000012", "step-000008"]


def test_a_disk_that_stays_full_ends_the_run_with_its_last_good_checkpoint(
    mount: Mount, resolved, straight
) -> None:
    disk = mount(4000)
    folder = disk / "run"
    deed = partial(once_saved, folder, 4, partial(fill, disk))
    text = fault_of(CheckpointError, folder, resolved, deed_at=6, deed=deed)
    assert text.startswith(
        f"The checkpoint of step 12 could not be written to {folder}/checkpoint ("
    )
    assert f"the disk at {disk} has " in text
    assert text.endswith(
        " Checkpoints kept: step-000004. Free some space, or lower checkpoint.keep."
    )
    read_manifest(folder / "checkpoint" / "step-000004")
    free(disk)
    ended = run(folder, resolved)
    assert ended.said[0] == f"Resuming after step 4 from {folder}/checkpoint/step-000004."
    assert ended.losses == pytest.approx(straight[4:], rel=EXACT)


def test_checkpoints_older_than_the_last_good_one_make_room(
    mount: Mount, resolved, straight
) -> None:
    disk = mount(4000)
    folder = disk / "run"
    deed = partial(once_saved, folder, 8, partial(fill, disk, leave=100_000))
    ended = run(folder, resolved, deed_at=9, deed=deed)
    assert ended.losses == pytest.approx(straight, rel=EXACT)
    assert checkpoints(folder) == ["step-000012", "step-000008"]
    assert not [line for line in ended.said if "could not" in line]


def test_room_that_shrinks_fast_is_used_before_it_is_gone(mount: Mount, resolved, straight) -> None:
    disk = mount(4000)
    folder = disk / "run"
    leave = 6 * 4 * resolved.model.params - 50_000  # for one checkpoint, but not for two
    text = fault_of(
        CheckpointError, folder, resolved, deed_at=2, deed=partial(fill, disk, leave=leave)
    )
    assert text.startswith("The next checkpoint needs ")
    assert f" and the disk at {disk} has " in text
    assert f" free; {folder}/checkpoint/step-000003 is kept. Free " in text
    assert text.endswith(
        " Step 3 was the last that could be kept, so the run stopped there; the same command "
        "goes on."
    )
    free(disk)
    assert run(folder, resolved).losses == pytest.approx(straight[3:], rel=EXACT)


def test_a_disk_without_room_for_the_first_checkpoint_is_refused_before_a_step(
    mount: Mount, resolved
) -> None:
    disk = mount(200)
    text = fault_of(CheckpointError, disk / "run", resolved)
    needed = 3 * 4 * resolved.model.params / 1024
    assert text.startswith(f"The next checkpoint needs {needed:.1f} KiB and the disk at {disk} has")
    assert losses(disk / "run") == []


# A disk that breaks. -------------------------------------------------------------------------


def test_a_disk_that_turns_read_only_ends_the_run_at_its_end_with_every_word(
    mount: Mount, break_disk, resolved
) -> None:
    disk = mount(16_384, breaks=True)
    folder = disk / "run"
    deed = partial(once_saved, folder, 4, partial(break_disk, disk))
    text = fault_of(CheckpointError, folder, resolved, deed_at=6, deed=deed)
    assert text.startswith(
        f"The checkpoint of step 12 could not be written to {folder}/checkpoint ("
    )
    assert "Read-only file system" in text
    assert " Checkpoints kept: step-000004. " in text


# A folder or a journal that goes. --------------------------------------------------------------


def test_a_moved_folder_is_followed_and_the_run_stops_there(
    tmp_path: Path, resolved, straight
) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    deed = partial(once_saved, folder, 4, partial(folder.rename, elsewhere))
    text = fault_of(FaultError, folder, resolved, deed_at=6, deed=deed)
    assert text == (
        f"The run's folder {folder} was moved to {elsewhere}. Step 7 is saved in "
        f"{elsewhere}/checkpoint; go on from there with --out {elsewhere}."
    )
    assert not folder.exists()
    for rank in (0, 1):
        assert losses(elsewhere, rank) == pytest.approx(straight[:7], rel=EXACT)
    assert run(elsewhere, resolved).losses == pytest.approx(straight[7:], rel=EXACT)


def delete(folder: Path) -> None:
    """In one go: ranks that write meanwhile would make new files in what is being deleted."""
    shutil.rmtree(folder.rename(folder.with_name("old")))


def test_a_deleted_folder_is_made_again_for_the_steps_that_are_in_memory(
    tmp_path: Path, resolved, straight
) -> None:
    folder = tmp_path / "run"
    text = fault_of(FaultError, folder, resolved, deed_at=6, deed=partial(delete, folder))
    assert text == (
        f"The run's folder {folder} has vanished: it was deleted or unmounted. Step 7 is saved in "
        f"{folder}/checkpoint; go on from there with --out {folder}."
    )
    assert checkpoints(folder) == ["step-000007"]
    assert [fault.message for fault in read_run(folder).faults if fault.name == "folder"] == [text]
    assert run(folder, resolved).losses == pytest.approx(straight[7:], rel=EXACT)


def replace(folder: Path) -> None:
    delete(folder)
    (folder / "journal").mkdir(parents=True)
    (folder / "journal" / "rank-00000.jsonl").write_text("another run's\n")


def test_another_runs_folder_in_its_place_is_left_alone(tmp_path: Path, resolved) -> None:
    folder = tmp_path / "run"
    text = fault_of(FaultError, folder, resolved, deed_at=6, deed=partial(replace, folder))
    assert text == (
        f"The run's folder {folder} has vanished: it was deleted or unmounted, and another run's "
        "stands in its place. The steps since the last checkpoint are lost. Train again with "
        "--out and a folder that nobody else uses."
    )
    assert [path.name for path in folder.rglob("*")] == ["journal", "rank-00000.jsonl"]
    assert (folder / "journal" / "rank-00000.jsonl").read_text() == "another run's\n"


def test_a_deleted_checkpoint_is_saved_again_at_once(tmp_path: Path, resolved, straight) -> None:
    folder = tmp_path / "run"
    kept = folder / "checkpoint" / "step-000004"
    deed = partial(once_saved, folder, 4, partial(delete, kept))
    ended = run(folder, resolved, deed_at=5, deed=deed)
    assert ended.losses == pytest.approx(straight, rel=EXACT)
    assert (
        f"The checkpoint {kept} has vanished: it was deleted or moved away. The run saves anew "
        "after this step."
    ) in ended.said
    saved = [event["step"] for event in events(folder, "save")]
    # Ranks have heard that it was published at step 5, or hear of it at step 6.
    assert saved in ([4, 6, 8, 12], [4, 7, 8, 12])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_deleted_journal_is_noticed_within_a_step_and_begun_anew(
    tmp_path: Path, resolved, straight, rank: int
) -> None:
    path = tmp_path / "run" / "journal" / f"rank-0000{rank}.jsonl"
    ended = run(tmp_path / "run", resolved, deed_at=6, deed=path.unlink, deed_rank=rank)
    assert ended.losses == pytest.approx(straight, rel=EXACT)
    (said,) = [line for line in ended.said if "rank-" in line]
    assert said == (
        f"The journal {path} has vanished: it was deleted or moved away. The run goes on and "
        "writes a new one there."
    )
    first = events(tmp_path / "run", "step", rank)[0]["step"]
    assert first == 7
    record = read_run(tmp_path / "run")
    assert record.stop.reason == "done"
    assert record.step.tolist() == list(range(7 if rank == 0 else 1, 13))


# From outside. ---------------------------------------------------------------------------------


def start(*words: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "equipoise.cli.main", "train", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def begin(mount: Mount, texts: Path, cache: Path, priced: Path, tmp_path: Path):
    """A run of a million steps on a small disk, once it has saved, and keeps one checkpoint."""
    disk = mount(6000)
    path = write_run(tmp_path, texts, cache, steps=1_000_000, every_steps=3, layout="dp = 2")
    folder = share_curve(priced, disk / "run")
    words = ("--journal.tensorboard", "true", "--checkpoint.keep", 1)
    process = start(path, "--out", folder, *words)
    wait_until(lambda: checkpoints(disk / "run"))
    return disk, process


def fill_for_good(disk: Path) -> None:
    """Fill a disk until no save is under way that could still end, or give way to an older one."""

    def is_full() -> bool:
        before = names()
        fill(disk)
        full = os.statvfs(disk).f_bavail == 0
        return full and len(before) == 1 and before[0].startswith("step-") and names() == before

    def names() -> list[str]:
        return os.listdir(disk / "run" / "checkpoint")

    wait_until(is_full)


def test_a_full_disk_is_named_and_ctrl_c_still_ends_the_run(
    mount: Mount, texts: Path, cache: Path, priced: Path, tmp_path: Path
) -> None:
    disk, process = begin(mount, texts, cache, priced, tmp_path)
    fill_for_good(disk)
    said = dict[str, str]()
    while len(said) < 2:  # in either order
        line = process.stdout.readline()
        assert line, said
        for mark in ("TensorBoard", "rank-00000.jsonl cannot be written"):
            if mark in line:
                said[mark] = line
    for line in said.values():
        assert f"cannot be written (No space left on device; the disk at {disk} has " in line
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 4, err
    assert "Traceback" not in err
    assert "could not be written to" in err and f"the disk at {disk} has " in err
    assert "without a word" not in err
    read_manifest(next(find_checkpoints(disk / "run" / "checkpoint")))


def test_a_deleted_folder_is_told_with_exit_code_6(
    texts: Path, cache: Path, priced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, texts, cache, steps=1_000_000, every_steps=3, layout="dp = 2")
    folder = share_curve(priced, tmp_path / "run")

    def vanish() -> None:
        wait_until(lambda: checkpoints(folder))
        delete(folder)

    assert train_while(vanish, path, "--out", folder) == 6
    (step,) = checkpoints(folder)
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"The run's folder {folder} has vanished: it was deleted or unmounted. Step "
        f"{int(step.removeprefix('step-'))} is saved in {folder}/checkpoint; go on from there "
        f"with --out {folder}."
    )


def test_a_start_on_a_full_disk_names_it(
    mount: Mount, texts: Path, cache: Path, tmp_path: Path
) -> None:
    disk = mount(100)
    path = write_run(tmp_path, texts, cache, steps=2, layout="dp = 2")
    fill(disk)
    process = start(path, "--out", disk / "run")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 2
    assert err.splitlines()[-1] == (
        f"The run's folder {disk}/run cannot be written (No space left on device; the disk at "
        f"{disk} has 0 B free). Make it writable, or choose another with --out."
    )
