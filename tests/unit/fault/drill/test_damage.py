"""Each tear changes what a checkpoint holds, and nothing else."""

from pathlib import Path

import pytest

from equipoise.fault.drill.damage import TEARS, rot


def checkpoint(folder: Path, shards: int, salt: int) -> Path:
    folder.mkdir()
    for shard in range(shards):
        data = bytes((salt + shard + at) % 251 + 1 for at in range(20_000))
        (folder / f"shard-{shard:05}.bin").write_bytes(data)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("tear", TEARS)
def test_a_tear_changes_a_shard(tmp_path: Path, tear: str, shards: int) -> None:
    newest = checkpoint(tmp_path / "step-000016", shards, 7)
    older = checkpoint(tmp_path / "step-000008", shards, 9)
    before, old = contents(newest), contents(older)
    name = sorted(before)[-1]
    TEARS[tear](newest / name, older / name)
    assert contents(newest) != before
    assert contents(older) == old


def test_rot_is_one_bit(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "step", 1, 3)
    ((name, before),) = contents(folder).items()
    rot(folder / name)
    after = contents(folder)[name]
    bits = [(a ^ b).bit_count() for a, b in zip(before, after, strict=True)]
    assert sum(bits) == 1
