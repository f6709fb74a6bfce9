"""Read the tensors of a checkpoint from its files, as torch's distributed checkpoint asks for them.

Why
    Torch's own files are pickles, and loading a pickle runs code. Here a shard is only bytes and
    a JSON index describes them, so a checkpoint can be wrong but cannot do anything.

What it decides
    Torch's planners decide which parts of which chunks a rank of a layout reads; ``places`` says
    where chunks are. What is read is verified block by block, in one pass.

Kept true (tests/multi/train/test_checkpoint.py, tests/multi/check/test_checkpoint_pickles.py)
    Whatever the layouts, tensors come back bitwise; no file of a folder is ever executed.
"""

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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.blocks import BlockReader, DamagedBlockError
from equipoise.checkpoint.index import INDEX, Chunk
from equipoise.checkpoint.index_first import read_any_index, read_archive
from equipoise.checkpoint.manifest import Manifest, damaged


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class ShardReader(StorageReader):
    """Reads the tensors of a checkpoint's folder, in any format, and verifies blocks meanwhile.

    Args:
        folder: The checkpoint.
        manifest: As ``open_manifest`` returned it. Without one, bytes were verified before.

    Raises:
        CheckpointError: the folder's index cannot be read, or does not match its files.
    """

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self._folder, self._manifest = folder, manifest
        self._is_first = not (folder / INDEX).exists()
        self.index = read_any_index(folder)
        self._open: dict[str, BlockReader] = {}
        self._chunks = {
            MetadataIndex(name, chunk.offsets): (stored.dtype, chunk)
            for name, stored in self.index.items()
            for chunk in stored.chunks
        }

    def close(self) -> None:
        """Close the files that were read."""
        for reader in self._open.values():
            reader.close()

    @property
    def verified(self) -> dict[str, list[int]]:
        """Numbers of the blocks that were verified while they were read, by file."""
        return {name: sorted(reader.verified) for name, reader in self._open.items()}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One reader reads one folder."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """The index, as torch's planners take it: only tensors, so nothing is unpickled."""
        tensors: dict[str, Any] = {}
        for name, stored in self.index.items():
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
        data = self._bytes(chunk)
        if not self._is_first:
            return _tensor(data, dtype).view(chunk.shape)
        stored, strides, offset = read_archive(io.BytesIO(data), dtype, chunk.shape)
        return _tensor(bytearray(stored), dtype).as_strided(chunk.shape, strides, offset)

    def _bytes(self, chunk: Chunk) -> bytearray:
        summed = None if self._manifest is None else self._manifest.summed(chunk.file)
        if summed is not None:
            if chunk.file not in self._open:
                self._open[chunk.file] = BlockReader(self._folder / chunk.file, summed)
            try:
                return self._open[chunk.file].read(chunk.start, chunk.size_bytes)
            except DamagedBlockError as error:
                raise damaged(self._folder, self.index, error) from error
        with (self._folder / chunk.file).open("rb") as file:
            file.seek(chunk.start)
            data = bytearray(file.read(chunk.size_bytes))
        if len(data) != chunk.size_bytes:
            raise CheckpointError(
                f"{chunk.file} ends before byte {chunk.start + chunk.size_bytes:,}"
            )
        return data

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
