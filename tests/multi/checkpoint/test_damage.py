"""Damaged checkpoints: noticed while they are loaded, named, and passed over."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.manifest import read_manifest
from equipoise.comm.local import run_ranks
from support.checkpoints import ranks as saving_ranks
from support.make_run import MODEL


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Checkpoints of steps 2 and 3 of two ranks, and fingerprints of all."""
    root = tmp_path_factory.mktemp("saved") / "checkpoint"
    return root, run_ranks(2, saving_ranks.save_steps, root, MODEL, 3)[0]


def cut(share: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        shard = folder / "shard-00001.bin"
        data = shard.read_bytes()
        shard.write_bytes(data[: int(share * len(data))])

    return damage


def flip(folder: Path) -> None:
    shard = folder / "shard-00001.bin"
    data = bytearray(shard.read_bytes())
    data[len(data) // 3] ^= 16
    shard.write_bytes(data)


def clear_page(folder: Path) -> None:
    shard = folder / "shard-00001.bin"
    data = bytearray(shard.read_bytes())
    data[4096:8192] = bytes(4096)
    shard.write_bytes(data)


def swap(folder: Path) -> None:
    one, other = (folder / f"shard-0000{rank}.bin" for rank in (0, 1))
    data = one.read_bytes(), other.read_bytes()
    size = min(map(len, data))  # also where both have their old size
    one.write_bytes(data[1][:size] + data[0][size:])
    other.write_bytes(data[0][:size] + data[1][size:])


def make_stale(folder: Path) -> None:
    shutil.copy(folder.with_name("step-000002") / "shard-00001.bin", folder)


def duplicate(folder: Path) -> None:
    other = folder / "shard-00000.bin"
    size = other.stat().st_size
    shard = folder / "shard-00001.bin"
    shard.write_bytes((other.read_bytes() * 2)[: shard.stat().st_size])
    assert other.stat().st_size == size


def remove(folder: Path) -> None:
    (folder / "shard-00001.bin").unlink()


SIZE = "is torn: shard-00001.bin has "
BYTES = "is torn: the bytes of shard-0000"
DAMAGE = {
    "cut to nothing": (cut(0), SIZE),
    "cut to 1%": (cut(0.01), SIZE),
    "cut to half": (cut(0.5), SIZE),
    "cut by 0.1%": (cut(0.999), SIZE),
    "one bit": (flip, BYTES),
    "a page of zeros": (clear_page, BYTES),
    "swapped": (swap, BYTES),
    "of an older step": (make_stale, BYTES),
    "another rank's": (duplicate, BYTES),
    "removed": (remove, SIZE),
}


# Three ranks meet every damage; one rank, every third.
@pytest.mark.parametrize(
    ("name", "world"), [*((each, 3) for each in DAMAGE), *((each, 1) for each in [*DAMAGE][::3])]
)
def test_a_damaged_shard_is_named_and_the_checkpoint_before_is_loaded(
    saved, tmp_path: Path, name: str, world: int
) -> None:
    damage, said = DAMAGE[name]
    root = Path(shutil.copytree(saved[0], tmp_path / "checkpoint"))
    damage(root / "step-000003")
    step, state, (sentence,) = run_ranks(world, saving_ranks.load_newest_of, root, MODEL)[0]
    assert (step, state) == (2, saved[1][1])
    assert sentence.startswith(f"{root}/step-000003 {said}")
    assert "; it lacks " in sentence or ", where it holds " in sentence
    assert " model." in sentence or " optimizer.state." in sentence
    with pytest.raises(CheckpointError) as caught:
        read_manifest(root / "step-000003")
    if world == 1:
        assert str(caught.value) == sentence


def test_an_undamaged_one_is_loaded(saved) -> None:
    root, states = saved
    step, state, sentences = run_ranks(3, saving_ranks.load_newest_of, root, MODEL)[0]
    assert (step, state, sentences) == (3, states[2], [])


def test_damage_of_all_is_an_error_that_names_it(saved, tmp_path: Path) -> None:
    root = Path(shutil.copytree(saved[0], tmp_path / "checkpoint"))
    for step in (2, 3):
        flip(root / f"step-00000{step}")
    with pytest.raises(CheckpointError) as caught:
        run_ranks(2, saving_ranks.load_newest_of, root, MODEL)
    assert str(caught.value).startswith(
        f"None of the 2 checkpoints in {root} is whole. {root}/step-000003 is torn: the bytes of "
        "shard-00001.bin have changed between 0 and "
    )
