"""Shards whose rows lie in a file: how much memory each gets, how they are made and saved.

Kept true (tests/multi/recsys/test_tiers.py)
    A table larger than its memory trains as one in memory does, to the bit, also when a run goes
    on; what a step waits for is counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from equipoise.balance.tables.tiers import deal_slots
from equipoise.base.arrays import Ints
from equipoise.memory.blocks import BlockFile
from equipoise.recsys.cache.held import CachedRows
from equipoise.recsys.optimizer import SparseStep, make_state
from equipoise.recsys.tiers.rows import DrawBlock, FileRows, pages_per_block, records_per_block
from equipoise.schedule.tables.placement import TablePlan
from equipoise.schedule.tiers.cache import SLOT_BYTES, CachePolicy, SetCache


@dataclass(frozen=True, slots=True)
class TableTiers:
    """Where rows lie that have no memory, and how much memory each of a rank's shards has."""

    folder: Path
    slots: Mapping[tuple[str, int], int]
    """Slots of each shard, by its table and index; a shard that is not here lies in memory."""
    policy: CachePolicy = "lfu"
    commit: int | None = None
    """The step whose rows are opened; None: a run that begins."""


def state_columns(step: SparseStep, width: int) -> dict[str, tuple[int, int]]:
    """Where the optimizer's floats stand in a record, behind those of the weights."""
    columns, begin = {}, width
    for name, part in make_state(step, torch.empty((1, width), device="meta")).items():
        columns[name] = (begin, begin + part.numel())
        begin += part.numel()
    return columns


def record_floats(step: SparseStep, width: int) -> int:
    """Floats of a row and of the optimizer's state of it."""
    return max((end for _, end in state_columns(step, width).values()), default=width)


def deal_tiers(
    plan: TablePlan,
    rank: int,
    step: SparseStep,
    counts: Mapping[str, Ints],
    memory_bytes: int,
    folder: Path,
    *,
    policy: CachePolicy = "lfu",
    commit: int | None = None,
) -> TableTiers:
    """Deal a rank's memory to its shards by their lookups.

    Args:
        plan: Where tables lie.
        rank: Whose shards.
        step: The optimizer, whose state a record holds.
        counts: Lookups of each row of each table.
        memory_bytes: For rows and optimizer state of this rank.
        folder: For the files.
        policy: Of the caches.
        commit: As for ``TableTiers``.
    """
    own: dict[str, Ints] = {}
    sizes: dict[str, int] = {}
    for each in plan.placements:
        shards = [0] if each.kind == "data" else each.shards_on(rank)
        for shard in shards:
            begin, end = each.columns(shard)
            width = end - begin
            floats = record_floats(step, width)
            key = f"{shard}:{each.table.name}"
            own[key] = counts[each.table.name][each.row_map.rows_of(each.row_shard(shard))]
            sizes[key] = 4 * floats + SLOT_BYTES
    answer = deal_slots(own, sizes, memory_bytes)
    slots = {}
    for key, count in answer.slots.items():
        shard_text, _, name = key.partition(":")
        if count < len(own[key]):
            slots[name, int(shard_text)] = count
    return TableTiers(folder, slots, policy, commit)


def hold_in_file(
    tiers: TableTiers,
    name: str,
    index: int,
    count: int,
    width: int,
    step: SparseStep,
    draw: DrawBlock,
    device: torch.device,
) -> CachedRows:
    """A shard's rows in its file, behind its slots.

    Args:
        tiers: The folder, the slots and the policy.
        name: The table.
        index: Which shard of it.
        count: Rows of the shard.
        width: Columns of it.
        step: The optimizer.
        draw: First weights of some places, float32 [n, width].
        device: Where slots lie.
    """
    folder = shard_folder(tiers.folder, name, index)
    tier = _open_rows(folder, count, width, step, draw, tiers.commit)
    columns = state_columns(step, width)
    cache = SetCache(count, tiers.slots[name, index], tiers.policy)
    return CachedRows(tier, cache, device, columns)


def shard_folder(folder: Path, name: str, index: int) -> Path:
    """Where a shard of a table has its file, in its rank's folder whatever the table's name."""
    return folder / f"{name.replace('/', '%2F')}-{index}"


def read_committed(
    folder: Path,
    count: int,
    width: int,
    step: SparseStep,
    draw: DrawBlock,
    commit: int,
    mark: np.ndarray | None,
) -> np.ndarray:
    """All weights of a shard as a commit has them, float32 [count, width].

    Args:
        folder: Of the shard's file; a run may go on writing to it.
        count: Rows of the shard.
        width: Columns of it.
        step: The optimizer, whose state a record holds.
        draw: First weights of some places, float32 [n, width].
        commit: Its step.
        mark: Of its content, as the checkpoint has it.

    Raises:
        CheckpointError: there is no such commit, or it is damaged or of another run.
    """
    tier = _open_rows(folder, count, width, step, draw, commit, is_read_only=True)
    try:
        tier.file.require(mark)
        return tier.read(torch.arange(count)).numpy()[:, :width]
    finally:
        tier.file.close()


def _open_rows(
    folder: Path,
    count: int,
    width: int,
    step: SparseStep,
    draw: DrawBlock,
    commit: int | None,
    *,
    is_read_only: bool = False,
) -> FileRows:
    """The file of a shard; a record holds a row and the optimizer's state of it."""
    floats = record_floats(step, width)

    def draw_records(places: Ints) -> np.ndarray:
        records = np.zeros((len(places), floats), dtype=np.float32)
        records[:, :width] = draw(places)
        return records

    blocks, pages = -(-count // records_per_block(floats)), pages_per_block(floats)
    file = BlockFile(folder, blocks, pages, commit, is_read_only=is_read_only)
    return FileRows(file, count, floats, draw_records)


def file_of(held: CachedRows | None) -> FileRows | None:
    """The file behind a shard's slots, if it has one."""
    return held.tier if held is not None and isinstance(held.tier, FileRows) else None
