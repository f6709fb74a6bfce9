"""Tensors of a checkpoint in files: planned by torch's distributed checkpoint, stored as bytes.

Why
    Torch's own files are pickles, and loading a pickle runs code. Here a shard is only bytes and
    a JSON index describes them, so a checkpoint can be wrong but cannot do anything.

What it decides
    Each rank writes its chunks one after another into ``shard-00003.bin``. Torch's planners decide
    which chunks those are, and which of them a rank of another layout reads.

Kept true (tests/multi/train/test_checkpoint.py, tests/multi/check/test_checkpoint_pickles.py)
    Whatever the layouts, tensors come back bitwise; no file of a folder is ever executed.
"""

import dataclasses
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.index import INDEX, Chunk, Index, StoredTensor, read_index, write_index
from equipoise.checkpoint.index_first import read_archive, read_first_index


def read_any_index(folder: Path) -> Index:
    """The index of a checkpoint, in this format or the first.

    Raises:
        CheckpointError: it cannot be read, or does not match the files.
    """
    return (read_index if (folder / INDEX).exists() else read_first_index)(folder)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class ShardWriter(StorageWriter):
    """Writes the tensors of a state, and nothing else, into an existing folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As the planner has it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank the number of its file."""
        return [dataclasses.replace(plan, storage_data=number) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks and flush them to disk."""
        name = f"shard-{plan.storage_data:05d}.bin"
        results = []
        with (self._folder / name).open("wb") as out:
            for item in plan.items:
                resolved = planner.resolve_data(item)
                if not isinstance(resolved, Tensor):
                    raise CheckpointError(f"{item.index.fqn} is not a tensor.")
                tensor = resolved.detach().cpu().contiguous()
                start = out.tell()
                out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
                results.append(WriteResult(item.index, tensor.nbytes, (name, start)))
            out.flush()
            os.fsync(out.fileno())
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of all ranks' chunks."""
        places = {each.index: each for rank in results for each in rank}
        index = {}
        for name, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(f"{name} is not a tensor.")
            chunks = []
            for box in stored.chunks:
                place = places[MetadataIndex(name, box.offsets)]
                file, start = place.storage_data
                chunks.append(
                    Chunk(tuple(box.offsets), tuple(box.sizes), file, start, place.size_in_bytes)
                )
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            index[name] = StoredTensor(dtype, tuple(stored.size), tuple(chunks))
        write_index(self._folder, index)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Torch never chooses this writer by itself."""
        del checkpoint_id
        return False


class ShardReader(StorageReader):
    """Reads the tensors of a checkpoint's folder, in this format or the first.

    Raises:
        CheckpointError: the folder's index cannot be read, or does not match its files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_first = not (folder / INDEX).exists()
        self._index = read_any_index(folder)
        self._chunks = {
            MetadataIndex(name, chunk.offsets): (stored.dtype, chunk)
            for name, stored in self._index.items()
            for chunk in stored.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One reader reads one folder."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """The index, as torch's planners take it: only tensors, so nothing is unpickled."""
        tensors: dict[str, Any] = {}
        for name, stored in self._index.items():
            boxes = [
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape))
                for chunk in stored.chunks
            ]
            properties = TensorProperties(dtype=getattr(torch, stored.dtype))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(stored.shape), boxes)
        return Metadata(tensors)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any
    ) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As the planner has it."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As the planner has it."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what this rank needs of each chunk into its tensors."""
        for item in plan.items:
            dtype, chunk = self._chunks[item.storage_index]
            stored = self._read(dtype, chunk)
            for dim, (offset, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                stored = stored.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            if target.shape != stored.shape:
                raise CheckpointError(
                    f"{item.dest_index.fqn} has shape {_shown(stored.shape)}; expected "
                    f"{_shown(target.shape)}."
                )
            target.copy_(stored)
            planner.commit_tensor(item, target)
        return _done(None)

    def _read(self, dtype: str, chunk: Chunk) -> Tensor:
        with (self._folder / chunk.file).open("rb") as file:
            file.seek(chunk.start)
            data = bytearray(file.read(chunk.size_bytes))
        if len(data) != chunk.size_bytes:
            raise CheckpointError(
                f"{chunk.file} ends before byte {chunk.start + chunk.size_bytes:,}"
            )
        if not self._is_first:
            return _tensor(data, dtype).view(chunk.shape)
        stored, strides, offset = read_archive(io.BytesIO(data), dtype, chunk.shape)
        return _tensor(bytearray(stored), dtype).as_strided(chunk.shape, strides, offset)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Torch never chooses this reader by itself."""
        del checkpoint_id
        return False


def _tensor(data: bytearray, dtype: str) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    return torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)


def _shown(shape: Sequence[int]) -> list[int]:
    return [int(length) for length in shape]
