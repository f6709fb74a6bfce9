"""Checkpoints of other tensors are refused in one sentence, and nothing is loaded of them."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from equipoise.base.digest import digest_file
from equipoise.checkpoint.index import INDEX, Index, StoredTensor, read_index, write_index
from equipoise.checkpoint.manifest import MANIFEST, open_manifest
from equipoise.comm.local import run_ranks
from support.checkpoints import reshaped
from support.checkpoints.sealed import write_manifest
from support.ranks.composed_ranks import SPARSE

EXPERTS = "model.layers.1.feed_forward.experts.gate.weight"
EMBED = "model.embed.weight"


def lacks_expert(index: dict[str, StoredTensor]) -> Index:
    return {name: stored for name, stored in index.items() if name != EXPERTS}


def has_more(index: dict[str, StoredTensor]) -> Index:
    return index | {"model.layers.9.norm.weight": index["model.norm.weight"]}


def other_dtype(index: dict[str, StoredTensor]) -> Index:
    return index | {EMBED: dataclasses.replace(index[EMBED], dtype="int32")}


def other_shape(index: dict[str, StoredTensor]) -> Index:
    def turned(pair: tuple[int, ...]) -> tuple[int, ...]:
        return pair[::-1]

    stored = index[EMBED]
    chunks = tuple(
        dataclasses.replace(each, offsets=turned(each.offsets), shape=turned(each.shape))
        for each in stored.chunks
    )
    return index | {EMBED: StoredTensor(stored.dtype, turned(stored.shape), chunks)}


def other_order(index: dict[str, StoredTensor]) -> Index:
    return {
        name: dataclasses.replace(stored, chunks=stored.chunks[::-1])
        for name, stored in reversed(index.items())
    }


def change(folder: Path, how: Callable[[dict[str, StoredTensor]], Index]) -> None:
    """Give a checkpoint another index, and seal it."""
    manifest = open_manifest(folder)
    write_index(folder, how(dict(read_index(folder))))
    described = ((folder / INDEX).stat().st_size, digest_file(folder / INDEX))
    files = manifest.files | {INDEX: described}
    (folder / MANIFEST).unlink()
    write_manifest(folder, dataclasses.replace(manifest, files=files))


CASES = {
    lacks_expert: f"it lacks {EXPERTS}",
    has_more: "it has model.layers.9.norm.weight, which this run does not have",
    other_dtype: f"its {EMBED} is int32 [61, 16] (this run: float32 [61, 16])",
    other_shape: f"its {EMBED} is float32 [16, 61] (this run: float32 [61, 16])",
    other_order: "",
}


def test_the_difference_is_named_and_no_byte_of_the_state_changes(tmp_path: Path) -> None:
    run_ranks(2, reshaped.save_stepped, tmp_path / "checkpoint", SPARSE, "dp=2")
    folders = []
    for how in CASES:
        copy = tmp_path / how.__name__ / "step-000002"
        shutil.copytree(tmp_path / "checkpoint" / "step-000002", copy)
        change(copy, how)
        folders.append(copy)
    ends = run_ranks(2, reshaped.load_refused, SPARSE, folders)
    assert ends[0] == ends[1]
    said, _ = ends[0].pop()
    assert said == f"{folders[0]}/gone is torn: its .metadata cannot be read."
    for folder, difference, (said, changed) in zip(folders, CASES.values(), ends[0], strict=True):
        if difference:
            assert said == (
                f"{folder} holds another model: {difference}. Give run.toml the sizes of the "
                f"checkpoint, or train into another folder with --out."
            )
        assert changed == (not difference)  # only the last is loaded
