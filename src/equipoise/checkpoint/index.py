"""Where each tensor of a checkpoint is stored: ``tensors.json``, plain data that runs no code.

Why
    Checkpoints travel between machines and people, so the index of their tensors must not be able
    to run code: it is JSON, and every number in it is checked against the files.

What it decides
    A tensor is stored in chunks, each the row-major bytes of a box of it, at an offset in a file
    that one rank wrote::

        {"model.embed.weight": {"dtype": "float32", "shape": [320, 32], "chunks": [
            {"offsets": [0, 0], "shape": [160, 32], "file": "shard-00000.bin", "start": 0, ...},
            {"offsets": [160, 0], "shape": [160, 32], "file": "shard-00001.bin", ...}]}}

    Checkpoints of format 1 have torch's ``.metadata`` instead (``checkpoint.index_first``).

Kept true (tests/unit/checkpoint/test_index.py)
    An index that points outside its files, or whose chunks do not fill a tensor, is refused.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from equipoise.base.errors import CheckpointError
from equipoise.schedule.block import Box

INDEX = "tensors.json"

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of an element of each dtype, by torch's names."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and its bytes: ``[start, start + size_bytes)`` of ``file``."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint; ``dtype`` is one of ``ITEM_BYTES``."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


Index = Mapping[str, StoredTensor]


def render_index(index: Index) -> str:
    """The text of ``tensors.json``."""
    data = {name: dataclasses.asdict(tensor) for name, tensor in sorted(index.items())}
    return json.dumps(data) + "\n"


def write_index(folder: Path, index: Index) -> None:
    """Write ``tensors.json``."""
    (folder / INDEX).write_text(render_index(index))


def read_index(folder: Path) -> Index:
    """Read ``tensors.json`` and check it against the files beside it.

    Raises:
        CheckpointError: it cannot be read, or contradicts the files.
    """
    index = parse_index(folder)
    require_sound(folder, INDEX, index)
    for name, tensor in index.items():
        for chunk in tensor.chunks:
            if chunk.size_bytes != math.prod(chunk.shape) * ITEM_BYTES[tensor.dtype]:
                raise _unsound(folder, INDEX, name, "a chunk of another size than its shape")
    return index


def parse_index(folder: Path) -> Index:
    """Read ``tensors.json`` without a look at the files beside it.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        data = json.loads((folder / INDEX).read_bytes())
        return {name: _tensor(each) for name, each in data.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder} is torn: its {INDEX} cannot be read.") from error


def name_tensors(index: Index, file: str, start: int, stop: int | None) -> str:
    """The first tensor with bytes in ``[start, stop)`` of a file, and how many more there are.

    Without ``stop`` those from ``start`` on. Empty if there are none.
    """
    names = [
        name
        for name, tensor in index.items()
        for chunk in tensor.chunks
        if chunk.file == file
        and chunk.start + chunk.size_bytes > start
        and (stop is None or chunk.start < stop)
    ]
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return f"{names[0]}{more}" if names else ""


def require_sound(folder: Path, source: str, index: Index) -> None:
    """Refuse an index that points outside its files or leaves a hole in a tensor.

    Args:
        folder: The checkpoint's folder.
        source: File that the index was read from, for the message.
        index: The index.

    Raises:
        CheckpointError: names the tensor.
    """
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    for name, tensor in index.items():
        if tensor.dtype not in ITEM_BYTES or min(tensor.shape, default=0) < 0:
            raise _unsound(folder, source, name, "an unknown type or shape")
        filled = 0
        for chunk in tensor.chunks:
            sides = zip(chunk.offsets, chunk.shape, tensor.shape, strict=False)
            if len(chunk.offsets) != len(tensor.shape) or len(chunk.shape) != len(tensor.shape):
                raise _unsound(folder, source, name, "a chunk of another shape")
            if any(offset < 0 or size < 0 or offset + size > all_ for offset, size, all_ in sides):
                raise _unsound(folder, source, name, "a chunk outside of it")
            end = chunk.start + chunk.size_bytes
            if min(chunk.start, chunk.size_bytes) < 0 or end > sizes.get(chunk.file, -1):
                raise _unsound(folder, source, name, f"bytes that {chunk.file} does not have")
            filled += math.prod(chunk.shape)
        boxes = [
            [(first, first + n) for first, n in zip(chunk.offsets, chunk.shape, strict=True)]
            for chunk in tensor.chunks
            if math.prod(chunk.shape)
        ]
        if filled != math.prod(tensor.shape) or _do_overlap(boxes):
            raise _unsound(folder, source, name, "chunks that do not fill it")


def _do_overlap(boxes: Sequence[Box], dim: int = 0) -> bool:
    """Whether two boxes have something in common; none is empty.

    Boxes of one layout are a grid; each of its lines is looked at alone.

    >>> _do_overlap([[(0, 2), (0, 4)], [(2, 4), (0, 2)], [(2, 4), (2, 4)]])
    False
    >>> _do_overlap([[(0, 2)], [(1, 3)]])
    True
    """
    if len(boxes) < 2 or dim == len(boxes[0]):
        return len(boxes) > 1
    lines: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        lines.setdefault(box[dim], []).append(box)
    if any(other[0] < one[1] for one, other in pairwise(sorted(lines))):
        return any(
            all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))
            for one, other in combinations(boxes, 2)
        )
    return any(_do_overlap(line, dim + 1) for line in lines.values())


def _unsound(folder: Path, source: str, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{folder} is torn: its {source} gives {name} {what}.")


def _tensor(data: Any) -> StoredTensor:
    chunks = tuple(
        Chunk(
            _whole(each["offsets"]),
            _whole(each["shape"]),
            str(each["file"]),
            *_whole([each["start"], each["size_bytes"]]),
        )
        for each in data["chunks"]
    )
    return StoredTensor(str(data["dtype"]), _whole(data["shape"]), chunks)


def _whole(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int for value in values):
        raise TypeError(values)
    return tuple(values)
