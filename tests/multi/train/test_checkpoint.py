"""Checkpoints over other worlds and ZeRO stages: bitwise; whole, or not there at all."""

import json
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.manifest import find_checkpoints, newest_good
from equipoise.checkpoint.room import stored_bytes
from equipoise.comm.local import run_ranks
from support.make_run import MODEL
from support.ranks import on_ranks


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def assert_bitwise(found: dict[str, np.ndarray], saved: dict[str, np.ndarray]) -> None:
    assert found.keys() == saved.keys()
    for name, array in saved.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, dict]]:
    """Checkpoints of two ranks at ZeRO 0, 1 and 3, and what was in them."""
    found = {}
    for zero in (0, 1, 3):
        root = tmp_path_factory.mktemp(f"zero-{zero}") / "checkpoint"
        state = run_ranks(2, on_ranks.save, root, MODEL, zero, [2])[0]
        found[zero] = (root / "step-000002", state)
    return found


@pytest.mark.parametrize(
    ("saved_zero", "world", "zero"),
    [(1, 1, 1), (1, 3, 3), (3, 1, 0), (3, 3, 1), (0, 3, 2), (0, 1, 3)],
)
def test_another_world_and_stage_load_every_tensor_bitwise(saved, saved_zero, world, zero) -> None:
    folder, state = saved[saved_zero]
    assert "embed.weight exp_avg" in state
    assert "embed.weight step" in state
    for found, _ in run_ranks(world, on_ranks.load, folder, MODEL, zero):
        assert_bitwise(found, state)


@pytest.mark.parametrize(("zero", "world", "load_zero"), [(1, 2, 1), (1, 3, 3), (3, 1, 0)])
def test_checkpoints_of_the_first_format_load_bitwise(
    tmp_path: Path, zero: int, world: int, load_zero: int
) -> None:
    state = run_ranks(2, on_ranks.save_first, tmp_path, MODEL, zero, 2)[0]
    folder = tmp_path / "step-000002"
    assert {".metadata", "__0_0.distcp", "__1_0.distcp"} < set(names(folder))
    for found in run_ranks(world, on_ranks.load_fresh, folder, MODEL, load_zero):
        assert_bitwise(found, state)


def test_a_checkpoint_holds_bytes_and_json_alone(saved) -> None:
    folder, state = saved[3]
    assert names(folder) == [
        "manifest.json",
        "shard-00000.bin",
        "shard-00001.bin",
        "tensors.json",
    ]
    size_bytes = sum(path.stat().st_size for path in folder.glob("*.bin"))
    assert size_bytes == sum(array.nbytes for array in state.values())
    stored = json.loads((folder / "tensors.json").read_text())["model.embed.weight"]
    chunks = [
        np.frombuffer(
            (folder / chunk["file"]).read_bytes()[chunk["start"] :][: chunk["size_bytes"]], "<f4"
        ).reshape(chunk["shape"])
        for chunk in stored["chunks"]
    ]
    np.testing.assert_array_equal(np.concatenate(chunks), state["embed.weight"])


def test_every_stage_saves_the_same_weights(saved) -> None:
    weights = [{k: v for k, v in state.items() if " " not in k} for _, state in saved.values()]
    assert_bitwise(weights[1], weights[0])
    assert_bitwise(weights[2], weights[0])


def test_an_optimizer_without_a_step_is_filled_too(saved) -> None:
    folder, state = saved[1]
    assert_bitwise(run_ranks(2, on_ranks.load_fresh, folder, MODEL, 3)[0], state)


def test_settings_of_the_optimizer_are_those_of_the_run_that_loads(saved) -> None:
    (_, decay), *_ = run_ranks(1, on_ranks.load, saved[1][0], MODEL, 1)
    assert decay == [0.7, 0.0]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    run_ranks(2, on_ranks.save, tmp_path, MODEL, 1, [1, 2, 3])
    assert names(tmp_path) == ["step-000002", "step-000003"]


def test_a_torn_later_checkpoint_never_costs_a_whole_one(tmp_path: Path) -> None:
    torn = tmp_path / "step-000020"
    torn.mkdir()
    run_ranks(1, on_ranks.save_keeping_one, tmp_path, MODEL, 10)
    run_ranks(1, on_ranks.save_keeping_one, tmp_path, MODEL, 15)
    assert names(tmp_path) == ["step-000015", "step-000020"]
    path, _, torn_sentences = newest_good(tmp_path)
    assert path.name == "step-000015"
    assert torn_sentences == [f"{torn} is torn: its manifest.json cannot be read."]


def test_a_save_of_a_step_that_was_torn_replaces_it(tmp_path: Path) -> None:
    run_ranks(1, on_ranks.save, tmp_path, MODEL, 1, [4])
    (tmp_path / "step-000004" / "shard-00000.bin").write_bytes(b"")
    (tmp_path / ".saving-000003").mkdir()
    state = run_ranks(1, on_ranks.save, tmp_path, MODEL, 1, [4])[0]
    assert names(tmp_path) == ["step-000004"]
    assert_bitwise(run_ranks(1, on_ranks.load_fresh, tmp_path / "step-000004", MODEL, 1)[0], state)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / "checkpoint"
    with pytest.raises(CheckpointError) as caught:
        run_ranks(2, on_ranks.save, root, MODEL, 1, [4])
    assert str(caught.value).startswith(
        f"The checkpoint of step 4 could not be written to {root} ([Errno 20] Not a directory: "
        f"'{root}'; it needs "
    )


def test_an_index_that_cannot_be_read(tmp_path: Path) -> None:
    run_ranks(1, on_ranks.save, tmp_path, MODEL, 1, [4])
    folder = tmp_path / "step-000004"
    index = (folder / "tensors.json").read_bytes()
    (folder / "tensors.json").write_bytes(index[:-200])
    with pytest.raises(CheckpointError) as caught:
        run_ranks(1, on_ranks.load_unverified, folder, MODEL)
    assert str(caught.value) == f"{folder} is torn: its tensors.json cannot be read."


def mounts() -> bool:
    """Whether a small file system can be mounted here."""
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/mnt"]
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for one checkpoint and a half."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=550k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def check_refused_save(root: Path, reason: str, rank_limit: int | None) -> None:
    good = run_ranks(2, on_ranks.save, root, MODEL, 1, [4])[0]
    with pytest.raises(CheckpointError) as caught:
        run_ranks(2, on_ranks.save_limited, root, MODEL, 5, rank_limit)
    message = str(caught.value)
    needed = stored_bytes(root / "step-000004")
    assert needed > 3 * 4 * MODEL.params
    assert message.startswith(f"The checkpoint of step 5 could not be written to {root} (")
    assert reason in message
    assert f"; it needs {needed / 1024:.1f} KiB, and the disk at " in message
    assert message.endswith(
        " free). Checkpoints kept: step-000004. Free some space, or lower checkpoint.keep."
    )
    assert [path.name for path in find_checkpoints(root)] == ["step-000004"]
    assert names(root) == ["step-000004"]
    path, _, torn = newest_good(root)
    assert torn == []
    assert_bitwise(run_ranks(3, on_ranks.load_fresh, path, MODEL, 3)[0], good)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_gets_too_large_costs_that_save_alone(tmp_path: Path, rank: int) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    check_refused_save(tmp_path, "([Errno 27] File too large; ", rank)


if mounts():

    def test_a_full_disk_costs_that_save_alone(small_disk: Path) -> None:
        check_refused_save(small_disk / "checkpoint", "([Errno 28] No space left on device; ", None)
