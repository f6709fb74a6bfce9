"""One checkpoint in many layouts: bitwise, and only the bytes that are needed."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.index import ITEM_BYTES, Index, read_index
from equipoise.checkpoint.manifest import open_manifest, read_manifest
from equipoise.checkpoint.reading import ReadCounts
from equipoise.comm.local import run_ranks
from equipoise.train.saving.reshape import ReshapeRequest, predict_reshape, reshape
from support.checkpoints import reshaped
from support.checkpoints.reshaped import Held
from support.ranks.composed_ranks import BIASED

FOUR = (
    "dp=4,zero=3",
    "dp=4,replicas=2",
    "tp=2,cp=2,zero=2",
    "dp=4,ep=2,etp=2",
    "dp=2,ep=2,pp=2,zero=0",
    "pp=2,dp=2,virtual=2",
)
SIX = ("dp=3,tp=2,ep=3", "dp=3,pp=2,ep=3")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three ranks: experts and biases of routers, a tied head, odd sizes."""
    root = tmp_path_factory.mktemp("saved") / "checkpoint"
    run_ranks(3, reshaped.save_stepped, root, BIASED, "dp=3")
    return root / "step-000002"


def contents(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, whole."""
    index: Index = read_index(folder)
    tensors = {}
    for name, stored in index.items():
        dtype = np.dtype({"float32": "<f4", "int64": "<i8"}[stored.dtype])
        tensor = np.zeros(stored.shape, dtype=dtype)
        for chunk in stored.chunks:
            data = (folder / chunk.file).read_bytes()[chunk.start :][: chunk.size_bytes]
            inside = tuple(
                slice(at, at + n) for at, n in zip(chunk.offsets, chunk.shape, strict=True)
            )
            tensor[inside] = np.frombuffer(data, dtype=dtype).reshape(chunk.shape)
        tensors[name] = tensor
    return tensors


def needed(folder: Path, mine: Held) -> int:
    index = read_index(folder)
    return sum(
        ITEM_BYTES[index[name].dtype] * math.prod(stop - first for first, stop in box)
        for name, (box, _) in mine.items()
    )


@pytest.mark.parametrize(
    ("world", "layouts", "first"), [(4, FOUR, None), (6, SIX, "dp=2,tp=2,pp=2,ep=2")]
)
def test_ranks_of_any_layout_load_it_bitwise_and_read_what_was_predicted(
    saved, tmp_path: Path, world: int, layouts: tuple[str, ...], first: str | None
) -> None:
    folder = saved
    if first is not None:
        folder, _ = reshape(ReshapeRequest(saved, first), tmp_path, lambda: None)
    predicted = {words: predict_reshape(ReshapeRequest(folder, words)) for words in layouts}
    cases = {words: (folder, each.stages) for words, each in predicted.items()}
    whole = contents(saved)
    rows = run_ranks(world, reshaped.load_layouts, BIASED, cases)
    for words, answer in predicted.items():
        assert answer.layout.world == world
        for rank, row in enumerate(rows):
            mine, counts = row[words]
            assert "optimizer.state.norm.weight.step" in mine or answer.stages is not None
            for tensor, (box, values) in mine.items():
                inside = tuple(slice(*each) for each in box)
                assert values.tobytes() == whole[tensor][inside].tobytes(), (words, tensor)
            assert counts == answer.ranks[rank], words
            assert counts.needed_bytes == needed(folder, mine)
        rest = sum(each.read_bytes - each.needed_bytes for each in answer.ranks)
        assert rest <= answer.stored_bytes


def test_a_chain_of_worlds_and_back_ends_with_the_same_bytes(saved, tmp_path: Path) -> None:
    folder = saved
    whole, at = contents(folder), folder
    manifest = open_manifest(folder)
    chain = (
        *("dp=8", "dp=3,tp=2,ep=3,zero=3", "dp=5,zero=2", "dp=1"),
        *("dp=2,tp=2,pp=2,ep=2", "cp=7,zero=0", "pp=4,virtual=1", "dp=8"),
    )
    written: list[tuple[Path, list[ReadCounts]]] = []
    for number, words in enumerate(chain):
        at, answer = reshape(ReshapeRequest(at, words), tmp_path / str(number), lambda: None)
        after = read_manifest(at)  # every byte is verified
        assert (after.step, after.world) == (manifest.step, answer.layout.world)
        assert (after.position_tokens, after.seed) == (manifest.position_tokens, manifest.seed)
        found = contents(at)
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            assert found[name].tobytes() == tensor.tobytes(), (words, name)
        shards = [path for path in at.iterdir() if path.suffix == ".bin"]
        assert len(shards) == answer.layout.world
        written.append((at, list(answer.ranks)))
    (first, _), (last, _) = written[0], written[-1]
    for path in first.iterdir():
        assert (last / path.name).read_bytes() == path.read_bytes(), path.name


def test_each_rank_of_a_rewritten_checkpoint_needs_its_own_file_and_what_it_shares(
    saved, tmp_path: Path
) -> None:
    folder = saved
    path, answer = reshape(ReshapeRequest(folder, "dp=4,zero=3"), tmp_path / "four", lambda: None)
    index = read_index(path)
    shared = sum(
        ITEM_BYTES[stored.dtype] * math.prod(stored.shape)
        for stored in index.values()
        if len(stored.chunks) == 1
    )
    sizes = {name: size for name, (size, _) in open_manifest(path).files.items()}
    for rank, counts in enumerate(answer.ranks):
        own = sizes[f"shard-{rank:05d}.bin"]
        assert own <= counts.read_bytes <= own + shared


def test_a_torn_checkpoint_is_not_rewritten_and_nothing_is_left(saved, tmp_path: Path) -> None:
    folder = saved
    copy = tmp_path / "runs" / "step-000002"
    copy.mkdir(parents=True)
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    data = bytearray((copy / "shard-00001.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "shard-00001.bin").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        reshape(ReshapeRequest(copy, "dp=4,tp=2"), tmp_path / "new", lambda: None)
    assert str(caught.value).startswith(
        f"{copy} is torn: the bytes of shard-00001.bin have changed between 0 and {len(data):,}, "
        f"where it holds "
    )
    assert not (tmp_path / "new").exists()
    assert json.loads((copy / "manifest.json").read_text())["step"] == 2
