"""Read the tensors of a checkpoint from its files, as torch's distributed checkpoint asks for them.

Why
    Torch's own files are pickles, and loading a pickle runs code. Here a shard is only bytes and
    a JSON index describes them, so a checkpoint can be wrong but cannot do anything.

What it decides
    Torch's planners decide which parts of which chunks a rank of a layout needs; ``places`` says
    where chunks are. ``reading`` divides reading and verifying over ranks that know each other's
    needs, ``parts`` does it.

Kept true (tests/multi/train/test_checkpoint.py, tests/multi/check/test_checkpoint_pickles.py)
    Whatever the layouts, tensors come back bitwise; no file of a folder is ever executed.
"""

import dataclasses
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.index import INDEX, ITEM_BYTES, Chunk
from equipoise.checkpoint.index_first import read_any_index, read_archive
from equipoise.checkpoint.manifest import Manifest
from equipoise.checkpoint.parts import RankReader, needs_of
from equipoise.checkpoint.reading import ReadCounts, bytes_of
from equipoise.comm.group import Ranks
from equipoise.schedule.block import Block

_Gathered = TypeVar("_Gathered")


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class ShardReader(StorageReader):
    """Reads what a rank needs of a checkpoint's folder, in any format, and verifies it meanwhile.

    Args:
        folder: The checkpoint.
        manifest: As ``open_manifest`` returned it. Without one, bytes were verified before.
        ranks: All ranks, each with one of these; one alone unless given.

    Raises:
        CheckpointError: the folder's index cannot be read, or does not match its files.
    """

    def __init__(
        self, folder: Path, manifest: Manifest | None = None, ranks: Ranks | None = None
    ) -> None:
        self._folder, self._manifest, self._ranks = folder, manifest, ranks
        self._is_first = not (folder / INDEX).exists()
        self.index = read_any_index(folder)
        self._reader: RankReader | None = None
        self._chunks = {
            MetadataIndex(name, chunk.offsets): (stored.dtype, chunk)
            for name, stored in self.index.items()
            for chunk in stored.chunks
        }

    def close(self) -> None:
        """Close the file that was read last."""
        if self._reader is not None:
            self._reader.close()

    @property
    def counts(self) -> ReadCounts:
        """What this rank has read."""
        if self._reader is None:
            return ReadCounts(0, 0, 0)
        return dataclasses.replace(self._reader.counts, read_bytes=self._reader.read_bytes)

    def settle(self) -> None:
        """Verify what no rank has needed, and compare what was read in part; ranks meet.

        Raises:
            CheckpointError: on every rank, if any has found damage.
        """
        if self._reader is None:
            return
        fault = ""
        try:
            self._reader.verify_rest()
        except CheckpointError as error:
            fault = str(error)
        rows = self._gather((fault, self._reader.sums, self._reader.expected))
        for fault, _, _ in rows:
            if fault:
                raise CheckpointError(fault)
        self._reader.compare([sums for _, sums, _ in rows], [each for _, _, each in rows])

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
        """Copy what this rank needs of each chunk into its tensors; ranks meet."""
        wanted = sorted(
            ((*self._chunks[item.storage_index], item) for item in plan.items),
            key=lambda each: (each[1].file, each[1].start),
        )
        parts = [self._part(*each) for each in wanted]
        mine: dict[str, list[Block]] = {}
        for (_, chunk, _), part in zip(wanted, parts, strict=True):
            mine.setdefault(chunk.file, []).append(part)
        needs = [needs_of(each) for each in self._gather(mine)]
        rank = 0 if self._ranks is None else self._ranks.rank
        self._reader = RankReader(self._folder, self.index, self._manifest, needs, rank)
        for (dtype, chunk, item), part in zip(wanted, parts, strict=True):
            data = bytearray(part.elements)
            self._reader.fill(chunk.file, part, memoryview(data))
            stored = self._stored(data, dtype, chunk, item)
            target = planner.resolve_tensor(item).detach()
            if target.shape != stored.shape:
                raise CheckpointError(
                    f"{item.dest_index.fqn} has shape {_shown(stored.shape)}; expected "
                    f"{_shown(target.shape)}."
                )
            target.copy_(stored)
            planner.commit_tensor(item, target)
        return _done(None)

    def _part(self, dtype: str, chunk: Chunk, item: ReadItem) -> Block:
        """The bytes of a chunk that an item needs: an archive of the first format is read whole."""
        if self._is_first:
            return Block(chunk.start, (chunk.size_bytes,), (1,)).canonical()
        box = [
            (first, first + length)
            for first, length in zip(item.storage_offsets, item.lengths, strict=True)
        ]
        return bytes_of(chunk, ITEM_BYTES[dtype], box)

    def _stored(self, data: bytearray, dtype: str, chunk: Chunk, item: ReadItem) -> Tensor:
        """What an item needs, as a tensor."""
        if not self._is_first:
            return _tensor(data, dtype).view(item.lengths)
        stored, strides, offset = read_archive(io.BytesIO(data), dtype, chunk.shape)
        whole = _tensor(bytearray(stored), dtype).as_strided(chunk.shape, strides, offset)
        for dim, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            whole = whole.narrow(dim, first, length)
        return whole

    def _gather(self, value: _Gathered) -> list[_Gathered]:
        return [value] if self._ranks is None else self._ranks.gather_objects(value)

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
