"""What says where tensors lie is held against the files."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.index import Chunk, StoredTensor, read_index, write_index

TENSOR = StoredTensor(
    "float32",
    (4, 3),
    (Chunk((0, 0), (1, 3), "a.bin", 4, 12), Chunk((1, 0), (3, 3), "b.bin", 0, 36)),
)
SCALAR = StoredTensor("int64", (), (Chunk((), (), "a.bin", 16, 8),))
EMPTY = StoredTensor("bfloat16", (0, 5), ())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.bin").write_bytes(bytes(24))
    (tmp_path / "b.bin").write_bytes(bytes(36))
    write_index(tmp_path, {"w": TENSOR, "step": SCALAR, "none": EMPTY})
    return tmp_path


def fault_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_index(folder)
    return str(caught.value)


def test_an_index_reads_back_as_it_was_written(folder: Path) -> None:
    assert read_index(folder) == {"w": TENSOR, "step": SCALAR, "none": EMPTY}


def first(**changes: Any) -> StoredTensor:
    chunk = dataclasses.replace(TENSOR.chunks[0], **changes)
    return dataclasses.replace(TENSOR, chunks=(chunk, TENSOR.chunks[1]))


def placed(*boxes: tuple[int, int, int, int]) -> StoredTensor:
    """The tensor in chunks of these rows and columns: first row, first column, rows, columns."""
    chunks = [
        Chunk((row, column), (rows, columns), "a.bin", 0, 4 * rows * columns)
        for row, column, rows, columns in boxes
    ]
    return dataclasses.replace(TENSOR, chunks=tuple(chunks))


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (dataclasses.replace(TENSOR, dtype="object"), "an unknown type or shape"),
        (dataclasses.replace(TENSOR, shape=(-4, 3)), "an unknown type or shape"),
        (first(offsets=(0,)), "a chunk of another shape"),
        (first(shape=(1, 3, 1)), "a chunk of another shape"),
        (first(offsets=(-1, 0)), "a chunk outside of it"),
        (first(offsets=(4, 0)), "a chunk outside of it"),
        (first(start=13), "bytes that a.bin does not have"),
        (first(start=-4), "bytes that a.bin does not have"),
        (first(size_bytes=10**15), "bytes that a.bin does not have"),
        (first(file="c.bin"), "bytes that c.bin does not have"),
        (first(file="../a.bin"), "bytes that ../a.bin does not have"),
        (first(file="/etc/passwd"), "bytes that /etc/passwd does not have"),
        (first(size_bytes=8), "a chunk of another size than its shape"),
        (first(shape=(1, 2), size_bytes=8), "chunks that do not fill it"),
        (dataclasses.replace(TENSOR, chunks=TENSOR.chunks[:1] * 4), "chunks that do not fill it"),
        (dataclasses.replace(TENSOR, chunks=()), "chunks that do not fill it"),
        (placed((0, 0, 2, 3), (1, 0, 2, 3)), "chunks that do not fill it"),
        (
            placed((0, 0, 2, 2), (1, 1, 2, 2), (3, 0, 1, 3), (0, 2, 1, 1)),
            "chunks that do not fill it",
        ),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, tensor: StoredTensor, what: str) -> None:
    write_index(folder, {"w": tensor})
    assert fault_of(folder) == f"{folder} is torn: its tensors.json gives w {what}."


@pytest.mark.parametrize(
    "change",
    [
        lambda data: [],
        lambda data: {"w": 3},
        lambda data: {"w": data["w"] | {"shape": ["4", "3"]}},
        lambda data: {"w": data["w"] | {"shape": [4.0, 3]}},
        lambda data: {"w": data["w"] | {"shape": [True, 3]}},
        lambda data: {"w": data["w"] | {"shape": None}},
        lambda data: {"w": data["w"] | {"chunks": [{}]}},
    ],
)
def test_what_is_no_index_is_refused(folder: Path, change: Callable[[Any], Any]) -> None:
    data = json.loads((folder / "tensors.json").read_text())
    (folder / "tensors.json").write_text(json.dumps(change(data)))
    assert fault_of(folder) == f"{folder} is torn: its tensors.json cannot be read."
    (folder / "tensors.json").write_text("[" * 100_000)
    assert fault_of(folder) == f"{folder} is torn: its tensors.json cannot be read."
    (folder / "tensors.json").unlink()
    assert fault_of(folder) == f"{folder} is torn: its tensors.json cannot be read."


@pytest.mark.parametrize(
    "boxes",
    [
        [(0, 0, 4, 3)],
        [(0, 0, 2, 2), (0, 2, 2, 1), (2, 0, 2, 3)],
        [(0, 0, 2, 2), (0, 2, 3, 1), (2, 0, 1, 2), (3, 0, 1, 3)],  # no grid
        [(0, 0, 4, 3), (4, 0, 0, 3), (4, 0, 0, 3)],  # ranks that hold nothing
    ],
)
def test_chunks_that_fill_a_tensor_may_be_cut_anyhow(
    folder: Path, boxes: list[tuple[int, int, int, int]]
) -> None:
    (folder / "a.bin").write_bytes(bytes(64))
    write_index(folder, {"w": placed(*boxes)})
    assert len(read_index(folder)["w"].chunks) == len(boxes)
