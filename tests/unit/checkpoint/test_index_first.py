"""Pickles of the first format are read and never obeyed."""

import io
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, state_dict_saver
from torch.distributed.checkpoint.state_dict_loader import load

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.index import Chunk, StoredTensor
from equipoise.checkpoint.index_first import read_archive, read_first_index
from equipoise.checkpoint.shards import ShardReader

STATE = {
    "w": torch.arange(12.0).view(4, 3),
    "turned": torch.arange(12.0).view(3, 4).t(),
    "step": torch.tensor(7.0),
    "narrow": torch.ones(5, dtype=torch.bfloat16),
    "long": torch.arange(3),
    "settings": {"lr": 0.1, "betas": (0.9, 0.95)},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with pytest.warns(UserWarning, match="torch.distributed is"):
        writer = FileSystemWriter(tmp_path / "step-000001")
        state_dict_saver.save(STATE, storage_writer=writer, no_dist=True)
    return tmp_path / "step-000001"


def test_tensors_of_any_type_and_order_come_back(folder: Path) -> None:
    index = read_first_index(folder)
    assert set(index) == {"w", "turned", "step", "narrow", "long"}
    state = {name: torch.empty_like(each) for name, each in STATE.items() if name in index}
    reader = ShardReader(folder)
    with pytest.warns(UserWarning, match="torch.distributed is"):
        load(state, storage_reader=reader, no_dist=True)
    reader.close()
    for name, tensor in state.items():
        assert torch.equal(tensor, STATE[name]), name


class Act:
    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self) -> tuple:
        return self.call[0], tuple(self.call[1:])


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("call", "name"),
    [
        ((os.system, "true"), "posix.system"),
        ((eval, "1"), "builtins.eval"),
        ((getattr, "x", "join"), "builtins.getattr"),
        ((torch.load, "x"), "torch.serialization.load"),
        ((io.open, "/dev/null"), "io.open"),
    ],
)
def test_what_a_pickle_asks_for_is_named_and_not_done(
    folder: Path, call: tuple, name: str, protocol: int
) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Act(*call), protocol))
    with pytest.raises(CheckpointError) as caught:
        read_first_index(folder)
    module, _, plain = name.rpartition(".")
    names = {name, f"__builtin__.{plain}", f"_io.{plain}"} if module else {name}
    assert str(caught.value) in {
        f"{folder} is torn: its .metadata is unsafe (it asks for {each})." for each in names
    }


@pytest.mark.parametrize(
    "data", [b"", b".", b"N.", b"}.", b"\x80", b"(" * 10**5, pickle.dumps({"a": 1}), b"garbage"]
)
def test_what_is_no_metadata_is_refused(folder: Path, data: bytes) -> None:
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"its \.metadata (cannot be read|is unsafe)"):
        read_first_index(folder)


def test_a_tensor_that_is_not_what_the_metadata_says(folder: Path) -> None:
    stored: StoredTensor = read_first_index(folder)["w"]
    chunk: Chunk = stored.chunks[0]
    data = (folder / chunk.file).read_bytes()[chunk.start :][: chunk.size_bytes]
    for dtype, shape in (("int32", (4, 3)), ("float32", (12,)), ("float64", (4, 3))):
        with pytest.raises(CheckpointError, match="a tensor of it cannot be read"):
            read_archive(io.BytesIO(data), dtype, shape)
    held, strides, offset = read_archive(io.BytesIO(data), "float32", (4, 3))
    assert (len(held), strides, offset) == (48, (3, 1), 0)
