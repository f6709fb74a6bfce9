"""Rewrite a checkpoint so that each rank of another layout finds its part in one file.

Why
    Any layout loads any checkpoint, but its ranks then read parts of many files. Where a checkpoint
    will be loaded often, or from a disk that is far away, it is worth writing it once as the ranks
    want it.

What it decides
    A box that several ranks hold is written by the one that has the fewest bytes by then. Shards
    are written one after another, each read as a rank reads (``checkpoint.parts``), so every byte
    is verified on its way; only then does the checkpoint get its name. Nothing else in it changes.

Kept true (tests/multi/checkpoint/test_reshape.py)
    Any chain of layouts and back ends with the same bytes of every tensor.
"""

import dataclasses
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from equipoise.base.disk import explain_refusal
from equipoise.base.errors import CheckpointError
from equipoise.base.read import read_text
from equipoise.checkpoint.index import INDEX, ITEM_BYTES, Chunk, Index, StoredTensor, render_index
from equipoise.checkpoint.manifest import (
    FIRST_FORMAT,
    FORMAT,
    Manifest,
    folder_name,
    remove,
    shard_name,
)
from equipoise.checkpoint.parts import RankReader, needs_of, summed_sizes
from equipoise.checkpoint.publish import SAVING, collect, publish, sync_above, write_part
from equipoise.checkpoint.reading import (
    Needs,
    ReadCounts,
    bytes_of,
    count_reads,
    overlap,
    plan_readings,
)
from equipoise.schedule.block import Block, Box

Boxes = Mapping[str, Box]
"""A rank's part of each tensor of an index, by name; a part may be empty."""


def needs_of_boxes(index: Index, boxes: Boxes) -> Needs:
    """The bytes of each file that hold a rank's parts."""
    blocks: dict[str, list[Block]] = {}
    for name, box in boxes.items():
        for chunk, part in _parts(index[name], box):
            block = bytes_of(chunk, ITEM_BYTES[index[name].dtype], part)
            blocks.setdefault(chunk.file, []).append(block)
    return needs_of(blocks)


def count_loads(
    folder: Path, manifest: Manifest, index: Index, ranks: Sequence[Boxes]
) -> list[ReadCounts]:
    """What ranks that hold these parts read when they load a checkpoint.

    Raises:
        CheckpointError: it has the first format, whose tensors are archives.
    """
    _require_plain(folder, manifest)
    sizes = summed_sizes(manifest)
    needs = [needs_of_boxes(index, boxes) for boxes in ranks]
    return [
        count_reads(sizes, mine, plan)
        for mine, plan in zip(needs, plan_readings(sizes, needs), strict=True)
    ]


def share_boxes(index: Index, ranks: Sequence[Boxes]) -> list[dict[str, Box]]:
    """Give each box that ranks hold to one of them: which boxes each rank writes.

    >>> index = {"w": StoredTensor("float32", (4,), ())}
    >>> share_boxes(index, [{"w": [(0, 2)]}, {"w": [(2, 4)]}, {"w": [(2, 4)]}])
    [{'w': [(0, 2)]}, {'w': [(2, 4)]}, {}]
    """
    written: list[dict[str, Box]] = [{} for _ in ranks]
    size_bytes = [0] * len(ranks)
    for name, stored in index.items():
        holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank, boxes in enumerate(ranks):
            if name in boxes and _count(boxes[name]):
                holders.setdefault(tuple(boxes[name]), []).append(rank)
        for box, held_by in holders.items():
            rank = min(held_by, key=size_bytes.__getitem__)
            written[rank][name] = list(box)
            size_bytes[rank] += _count(box) * ITEM_BYTES[stored.dtype]
    return written


def rewrite(
    folder: Path,
    manifest: Manifest,
    index: Index,
    ranks: Sequence[Boxes],
    root: Path,
    *,
    wrote: Callable[[], None],
) -> Path:
    """Write a checkpoint anew as ranks that hold these parts would save it.

    Args:
        folder: The checkpoint.
        manifest: As ``open_manifest`` returned it.
        index: Its tensors.
        ranks: The parts of each rank.
        root: Folder of checkpoints to write into; made if it is missing.
        wrote: Called after each rank's shard.

    Returns:
        The new checkpoint's folder.

    Raises:
        CheckpointError: the checkpoint is torn, of the first format, or the new one could not be
            written; nothing is left of it.
    """
    _require_plain(folder, manifest)
    shared = share_boxes(index, ranks)
    laid = [_lay_out(index, boxes) for boxes in shared]
    needs = [needs_of_boxes(index, boxes) for boxes in shared]
    name = f"{SAVING}{manifest.step:06d}"
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with ExitStack() as stack:
        try:
            made = next(each for each in (*reversed(root.parents), root) if not each.exists())
        except StopIteration:
            made = root / name
        try:
            root.mkdir(parents=True, exist_ok=True)
            root_handle = os.open(root, flags)
            stack.callback(os.close, root_handle)
            os.mkdir(name, dir_fd=root_handle)
            handle = os.open(name, flags, dir_fd=root_handle)
            stack.callback(os.close, handle)
            readers = []
            for rank, (chunks, size_bytes) in enumerate(laid):
                reader = stack.enter_context(RankReader(folder, index, manifest, needs, rank))
                readers.append(reader)
                data = _fill(index, chunks, size_bytes, reader)
                reader.close()
                write_part(handle, rank, memoryview(data), threading.Event())
                wrote()
            readers[0].compare([each.sums for each in readers], [each.expected for each in readers])
            shards = collect(handle, len(ranks), threading.Event())
            texts = {
                each: read_text(folder / each)
                for each in manifest.files
                if each not in manifest.blocks and each != INDEX
            }
            texts[INDEX] = render_index(_new_index(index, laid))
            whole = dataclasses.replace(manifest, format=FORMAT, world=len(ranks))
            sync_above(root)
            publish(root_handle, name, handle, whole, shards, texts)
        except BaseException as error:
            remove(made)
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"The checkpoint could not be written to {root} "
                    f"({explain_refusal(error, root)}). Name a folder on another disk."
                ) from error
            raise
    return root / folder_name(manifest.step)


_Laid = dict[str, Chunk]
"""Where a rank writes its part of each tensor."""


def _lay_out(index: Index, boxes: Boxes) -> tuple[_Laid, int]:
    """Boxes end to end in a rank's file, those of wide numbers first, and the size of all.

    The file's name is added when ranks are known.
    """
    laid, start = {}, 0
    for name, box in sorted(boxes.items(), key=lambda each: -ITEM_BYTES[index[each[0]].dtype]):
        size_bytes = _count(box) * ITEM_BYTES[index[name].dtype]
        offsets = tuple(first for first, _ in box)
        shape = tuple(stop - first for first, stop in box)
        laid[name] = Chunk(offsets, shape, "", start, size_bytes)
        start += size_bytes
    return laid, start


def _fill(index: Index, laid: _Laid, size_bytes: int, reader: RankReader) -> bytearray:
    """A rank's shard, read from the old ones in the order of their bytes."""
    data = bytearray(size_bytes)
    memory = np.frombuffer(data, dtype=np.uint8)
    moves = []
    for name, place in laid.items():
        box = [(at, at + n) for at, n in zip(place.offsets, place.shape, strict=True)]
        moves += [(chunk, part, name, place) for chunk, part in _parts(index[name], box)]
    for chunk, part, name, place in sorted(moves, key=lambda each: (each[0].file, each[0].start)):
        item = ITEM_BYTES[index[name].dtype]
        block = bytes_of(chunk, item, part)
        read = bytearray(block.elements)
        reader.fill(chunk.file, block, memoryview(read))
        target = memory[place.start : place.start + place.size_bytes].reshape(*place.shape, item)
        inside = tuple(
            slice(corner + first - at, corner + stop - at)
            for (first, stop), corner, at in zip(part, chunk.offsets, place.offsets, strict=True)
        )
        shape = [stop - first for first, stop in part]
        target[inside] = np.frombuffer(read, dtype=np.uint8).reshape(*shape, item)
    reader.verify_rest()
    return data


def _new_index(index: Index, laid: Sequence[tuple[_Laid, int]]) -> Index:
    return {
        name: dataclasses.replace(
            stored,
            chunks=tuple(
                dataclasses.replace(mine[name], file=shard_name(rank))
                for rank, (mine, _) in enumerate(laid)
                if name in mine
            ),
        )
        for name, stored in index.items()
    }


def _parts(stored: StoredTensor, box: Box) -> list[tuple[Chunk, Box]]:
    """What each chunk of a tensor has of a box."""
    parts = ((chunk, overlap(chunk, box)) for chunk in stored.chunks)
    return [(chunk, part) for chunk, part in parts if part is not None]


def _count(box: Box) -> int:
    return math.prod(stop - first for first, stop in box)


def _require_plain(folder: Path, manifest: Manifest) -> None:
    if manifest.format == FIRST_FORMAT:
        raise CheckpointError(
            f"{folder} has checkpoint format {FIRST_FORMAT}, whose tensors are archives that are "
            f"read whole. Train one more step from it, and convert what that saves."
        )
