"""Read what the first versions wrote, torch's ``.metadata`` and ``.distcp``, without running code.

Why
    Both are pickles, which may call anything when they are loaded. Such checkpoints still exist, so
    they are read by an unpickler that knows a dozen names and replaces each by a record without
    behaviour: what a pickle asks for is recorded, never done.

What it decides
    ``.metadata`` becomes an ``Index`` whose chunks are the archives that ``torch.save`` wrote
    for each piece: a zip of ``data.pkl`` (shape, strides, type) and ``data/0`` (the bytes).
    Entries other than tensors, such as the optimizer's settings, are pickles too; they were
    never used and are left out.

Kept true (tests/unit/checkpoint/test_index_first.py, tests/multi/train/test_checkpoint.py)
    Any other name is an error; checkpoints of format 1 load bitwise.

Sources
    torch 2.8 to 2.13: distributed/checkpoint/metadata.py and filesystem.py, ``_StorageInfo``;
    torch/_utils.py, ``_rebuild_tensor_v2``.
"""

import io
import math
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.index import (
    INDEX,
    ITEM_BYTES,
    Chunk,
    Index,
    StoredTensor,
    read_index,
    require_sound,
)

METADATA = ".metadata"


class _Record:
    """The object that a pickle asked for, as arguments and state without behaviour."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "_Record":
        """A record, whether a pickle calls the name or creates a bare object of it."""
        record = super().__new__(cls)
        record.args, record.state = args, {}
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Tensor(_Record):
    pass


class _Key(_Record):
    pass


_DCP = "torch.distributed.checkpoint"
_METADATA_NAMES: dict[tuple[str, str], Any] = {
    (f"{_DCP}.metadata", "Metadata"): _Record,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): _Record,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): _Record,
    (f"{_DCP}.metadata", "TensorProperties"): _Record,
    (f"{_DCP}.metadata", "MetadataIndex"): _Key,
    (f"{_DCP}.metadata", "StorageMeta"): _Record,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _Record,
    (f"{_DCP}.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _Record,
    ("torch", "Size"): tuple,
    ("pathlib", "PosixPath"): _Record,
    **{("torch", name): name for name in ITEM_BYTES},
}

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "LongStorage": "int64",
    "IntStorage": "int32",
}
_TENSOR_NAMES: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _Record,
    ("collections", "OrderedDict"): _Record,
    **{("torch", storage): dtype for storage, dtype in _STORAGES.items()},
}


class _Noting(pickle.Unpickler):
    """Unpickles into records; an unknown name is an error."""

    def __init__(self, data: bytes, names: dict[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._names[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None

    def persistent_load(self, key: Any) -> Any:
        return key


def read_any_index(folder: Path) -> Index:
    """The index of a checkpoint, in this format or the first.

    Raises:
        CheckpointError: it cannot be read, or does not match the files.
    """
    return (read_index if (folder / INDEX).exists() else read_first_index)(folder)


def read_first_index(folder: Path) -> Index:
    """Read the ``.metadata`` of a checkpoint of format 1.

    Raises:
        CheckpointError: it is not such metadata, or asks for a name that none needs.
    """
    try:
        metadata = _Noting((folder / METADATA).read_bytes(), _METADATA_NAMES).load().state
        places = {
            (key.state["fqn"], _whole(key.state["offset"])): place.state
            for key, place in metadata["storage_data"].items()
            if key.state.get("offset") is not None
        }
        index = {
            str(name): _stored(name, tensor.state, places)
            for name, tensor in metadata["state_dict_metadata"].items()
            if isinstance(tensor, _Tensor)
        }
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{folder} is torn: its {METADATA} is unsafe ({error}).") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{folder} is torn: its {METADATA} cannot be read.") from error
    require_sound(folder, METADATA, index)
    _require_archives(folder, index)
    return index


def _whole(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int for value in values):
        raise TypeError(values)
    return tuple(values)


def _stored(name: str, tensor: Any, places: Any) -> StoredTensor:
    chunks = []
    for each in tensor["chunks"]:
        offsets = _whole(each.state["offsets"])
        place = places[name, offsets]
        if place.get("transform_descriptors"):
            raise ValueError("transformed")
        start, size_bytes = _whole([place["offset"], place["length"]])
        shape = _whole(each.state["sizes"])
        chunks.append(Chunk(offsets, shape, str(place["relative_path"]), start, size_bytes))
    return StoredTensor(str(tensor["properties"].state[0]), _whole(tensor["size"]), tuple(chunks))


def read_archive(
    file: IO[bytes], dtype: str, shape: tuple[int, ...]
) -> tuple[bytes, tuple[int, ...], int]:
    """Read one tensor's archive of ``torch.save``.

    Returns:
        The storage's bytes, and the strides [elements] and the offset [elements] in it.

    Raises:
        CheckpointError: it does not hold a tensor of this type and shape.
    """
    with _archive(file, dtype, shape) as (archive, storage, strides, offset):
        return archive.read(storage), strides, offset


@contextmanager
def _archive(
    file: IO[bytes], dtype: str, shape: tuple[int, ...]
) -> Iterator[tuple[zipfile.ZipFile, zipfile.ZipInfo, tuple[int, ...], int]]:
    try:
        with zipfile.ZipFile(file) as archive:
            root = archive.namelist()[0].split("/")[0]
            record = _Noting(archive.read(f"{root}/data.pkl"), _TENSOR_NAMES).load()
            (_, held, key, _, count), offset, held_shape, strides, *_ = record.args
            storage = archive.getinfo(f"{root}/data/{key}")
            strides = _whole(strides)
            (offset,) = _whole([offset])
            last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
            if (
                (held, _whole(held_shape)) != (dtype, shape)
                or storage.file_size != count * ITEM_BYTES[dtype]
                or min(offset, *strides, 0) < 0
                or (math.prod(shape) and last >= count)
            ):
                raise ValueError("another tensor")
            yield archive, storage, strides, offset
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"a tensor of it is unsafe ({error})") from error
    except Exception as error:  # so may a damaged zip
        raise CheckpointError("a tensor of it cannot be read") from error


def _require_archives(folder: Path, index: Index) -> None:
    """Check every archive, except for its tensor's bytes."""
    for name, tensor in index.items():
        for chunk in tensor.chunks:
            with (folder / chunk.file).open("rb") as file:
                view = cast("IO[bytes]", _View(file, chunk.start, chunk.size_bytes))
                try:
                    with _archive(view, tensor.dtype, chunk.shape):
                        pass
                except CheckpointError as error:
                    raise CheckpointError(f"{folder} is torn: {name} in it: {error}.") from error


class _View(io.RawIOBase):
    """Bytes [start, start + size) of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data
