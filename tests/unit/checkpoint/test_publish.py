"""A checkpoint that has its name is on the disk whole, whenever the power is cut."""

import os
import threading
from pathlib import Path

import pytest

from equipoise.checkpoint import publish
from equipoise.checkpoint.index import INDEX
from equipoise.checkpoint.manifest import FORMAT, Manifest, read_manifest
from equipoise.checkpoint.under_way import UnderWay


def test_bytes_and_names_are_flushed_before_a_checkpoint_has_its_name(tmp_path: Path) -> None:
    """Whatever was not flushed before the name is given would be lost with the power."""
    flushed: dict[Path, set[str]] = {}
    held: dict[Path, bytes] = {}
    order: list[str] = []
    flush = os.fsync

    def fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        order.append(path.name)
        if path.is_dir():
            flushed[path] = set(os.listdir(path))
        else:
            held[path] = path.read_bytes()
        flush(handle)

    def swap(root: int, one: str, other: str) -> bool:
        order.append(f"{other} is the name of {one}")
        return False  # as where the system cannot: renamed at once

    root = tmp_path / "run" / "checkpoint"
    save, never = UnderWay(root, ".saving-000001-a", 0.0), threading.Event()
    manifest = Manifest(FORMAT, "0.1.0", 1, 1024, 2, {}, "c" * 32, 0, 256, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(publish, "swap_names", swap)
        save.open()
        for rank in range(2):
            publish.write_part(save.handle, rank, memoryview(bytes([rank]) * 5000), never)
        shards = publish.collect(save.handle, 2, never)
        publish.sync_above(root)
        places = (save.root_handle, save.name, save.handle)
        publish.publish(*places, manifest, shards, {INDEX: "{}"})
    save.close()
    final = root / "step-000001"
    assert read_manifest(final).step == 1
    written = {path.name: path.read_bytes() for path in final.iterdir()}
    assert sorted(written) == ["manifest.json", "shard-00000.bin", "shard-00001.bin", INDEX]
    named = order.index(f"{final.name} is the name of {save.name}")
    partial = root / save.name
    assert {name: held.get(partial / name) for name in written} == written
    assert flushed[partial] == set(written)
    assert {*written, partial.name} <= set(order[:named])
    assert order[named + 1 :] == ["checkpoint"]
    assert flushed[root] == {final.name}
    # The folders above are new, too.
    assert "checkpoint" in flushed[tmp_path / "run"]
    assert "run" in flushed[tmp_path]
