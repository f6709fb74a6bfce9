"""Checkpoints that differ in what they say of themselves, and whose sums are right."""

from pathlib import Path

import pytest

from equipoise.base.digest import digest_file
from equipoise.checkpoint.index import Chunk, StoredTensor, read_index, write_index
from equipoise.checkpoint.manifest import (
    FORMAT,
    Manifest,
    NewerCheckpointError,
    newest_good,
    read_manifest,
)
from equipoise.fault.drill.skewed import make_newer, make_other_dtype
from support.checkpoints.sealed import describe_files, write_manifest


def written(root: Path) -> Path:
    """A whole checkpoint of two small tensors."""
    folder = root / "checkpoint" / "step-000008"
    folder.mkdir(parents=True)
    (folder / "shard-00000.bin").write_bytes(bytes(range(24)))
    chunks = (
        Chunk((0,), (4,), "shard-00000.bin", 0, 16),
        Chunk((0,), (1,), "shard-00000.bin", 16, 8),
    )
    index = {
        "model.w": StoredTensor("float32", (4,), chunks[:1]),
        "count": StoredTensor("int64", (1,), chunks[1:]),
    }
    write_index(folder, index)
    manifest = Manifest(FORMAT, "0.1.0", 8, 8192, 1, {}, "c" * 32, 0, 256, describe_files(folder))
    write_manifest(folder, manifest)
    return folder


def test_another_dtype_leaves_every_sum_right(tmp_path: Path) -> None:
    checkpoint = written(tmp_path)
    shard = digest_file(checkpoint / "shard-00000.bin")
    assert make_other_dtype(checkpoint) == "model.w float32 -> int32"
    read_manifest(checkpoint)
    index = read_index(checkpoint)
    assert {name: tensor.dtype for name, tensor in index.items()} == {
        "model.w": "int32",
        "count": "int64",
    }
    assert digest_file(checkpoint / "shard-00000.bin") == shard


def test_a_newer_format_is_refused_by_its_number(tmp_path: Path) -> None:
    checkpoint = written(tmp_path)
    assert make_newer(checkpoint) == f"{FORMAT} -> {FORMAT + 1}"
    with pytest.raises(NewerCheckpointError) as caught:
        newest_good(checkpoint.parent)
    assert str(caught.value) == (
        f"{checkpoint} has checkpoint format {FORMAT + 1}, written by equipoise 9.0; this version "
        f"reads up to {FORMAT}. Upgrade equipoise."
    )
