"""How a run keeps its rows: in few bits, in files, fetched ahead and committed.

Kept true (tests/multi/recsys/test_tiers.py, tests/multi/recsys/test_precision.py)
    Rows in files and rows of few bits train, go on, and are counted; bytes are those predicted.
"""

from pathlib import Path

import numpy as np
import torch

from equipoise.base.arrays import Ints
from equipoise.numerics.rows import row_bytes
from equipoise.recsys.bags import locate_rows
from equipoise.recsys.cache.foresight import CachedShard
from equipoise.recsys.cache.packed import TablePrecision
from equipoise.recsys.embedding import ShardedTables
from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.optimizer import SparseStep
from equipoise.recsys.samples import Samples
from equipoise.recsys.shard import RowKeeping
from equipoise.recsys.tiers.held import deal_tiers, file_of, record_floats
from equipoise.recsys.tiers.rows import held_of_blocks
from equipoise.schedule.tables.placement import TablePlan
from equipoise.schedule.tiers.cache import SetCache
from equipoise.spec.recommend import RecommendSpec

_FOLDER = "tiers"


def keep_rows(
    spec: RecommendSpec,
    samples: Samples,
    plan: TablePlan,
    step: SparseStep,
    folder: Path,
    rank: int,
    commit: int | None,
) -> RowKeeping | None:
    """How this rank's rows are kept; None: as fp32 in memory.

    Args:
        spec: The run.
        samples: Its samples; memory is dealt by the lookups of the training part.
        plan: Where tables lie.
        step: The sparse optimizer.
        folder: The run's.
        rank: This one.
        commit: The step of the checkpoint that the run goes on from; None: none.
    """
    tables = spec.tables
    if tables.memory_mib:
        return deal_tiers(
            plan,
            rank,
            step,
            samples.row_counts(),
            int(tables.memory_mib * 2**20),
            rank_folder(folder, rank),
            policy=tables.cache_policy,
            commit=commit,
        )
    if tables.precision == "fp32":
        return None
    return TablePrecision(tables.precision, tables.rounding, tables.cache, tables.cache_policy)


def rank_folder(folder: Path, rank: int) -> Path:
    """Where a rank of a run's folder has its files of rows."""
    return folder / _FOLDER / f"rank-{rank:05d}"


def fetch_ahead(tables: ShardedTables, batch: KeyedJagged) -> None:
    """Begin to read from files what the next step looks up; ``batch`` is that of all ranks."""
    for shard in tables.held():
        held, file = shard.held, file_of(shard.held)
        if held is None or file is None:
            continue
        rows = torch.unique(batch.bags(shard.table.name)[1])
        owner, place = locate_rows(rows, shard.placement.row_map)
        own = owner == shard.placement.row_shard(shard.index)
        places = np.sort(place[own].numpy())
        file.fetch(places[held.cache.find(places) < 0])


def commit_files(tables: ShardedTables, step: int) -> None:
    """Write slots to their files and make these the commits of a step's checkpoint."""
    for shard in tables.held():
        held, file = shard.held, file_of(shard.held)
        if held is not None and file is not None:
            held.flush(step)
            file.file.commit(step)


def count_held(tables: ShardedTables) -> dict[str, dict[str, float]]:
    """For each table whose rows lie behind a cache: bytes of memory, reads, hits, blocks, waits."""
    counted: dict[str, dict[str, float]] = {}
    for shard in tables.held():
        if (held := shard.held) is None:
            continue
        begin, end = shard.columns
        own = counted.setdefault(shard.table.name, {})
        file = file_of(held)
        parts: dict[str, float] = {
            "bytes": held.held_bytes,
            "fp32_bytes": 4 * shard.count * (end - begin),
            "reads": held.reads,
            "hits": held.hits,
        }
        if file is not None:
            parts |= {
                "fp32_bytes": 4 * shard.count * file.width,
                "blocks_read": file.file.blocks_read,
                "blocks_written": file.file.blocks_written,
                "stall_s": file.stall_s,
            }
        for key, value in parts.items():
            own[key] = own.get(key, 0) + value
    return counted


def count_bytes(tables: ShardedTables) -> int:
    """Bytes of rows, caches and the optimizer's state in this rank's memory."""
    held = 0
    for shard in tables.held():
        held += sum(4 * part.numel() for part in (shard.weight, *shard.state.values()))
        held += 0 if shard.held is None else shard.held.held_bytes
    return held


def predict_bytes(spec: RecommendSpec, samples: Samples, plan: TablePlan) -> Ints:
    """What ``count_bytes`` gives on each rank of a run, int64 [ranks]."""
    step, held = SparseStep(spec.tables.optimizer), np.zeros(plan.ranks, dtype=np.int64)
    for rank in range(plan.ranks):
        kept = keep_rows(spec, samples, plan, step, Path(), rank, None)
        for each in plan.placements:
            for shard in [0] if each.kind == "data" else each.shards_on(rank):
                begin, end = each.columns(shard)
                count = each.row_map.count(each.row_shard(shard))
                held[rank] += _shard_bytes(kept, each.table.name, shard, count, end - begin, step)
    return held


def cached_shards(kept: RowKeeping | None, plan: TablePlan, rank: int) -> list[CachedShard]:
    """The shards of a rank whose rows will lie behind a cache, and their empty caches."""
    shards = []
    for each in plan.placements:
        for shard in [0] if each.kind == "data" else each.shards_on(rank):
            begin, end = each.columns(shard)
            count = each.row_map.count(each.row_shard(shard))
            cache = _cache_of(kept, each.table.name, shard, count, end - begin)
            if cache is not None:
                shards.append(CachedShard(each, shard, cache))
    return shards


def _cache_of(
    kept: RowKeeping | None, name: str, shard: int, count: int, width: int
) -> SetCache | None:
    if isinstance(kept, TablePrecision):
        return SetCache(count, kept.slots(count, width), kept.policy)
    if kept is None or (name, shard) not in kept.slots:
        return None
    return SetCache(count, kept.slots[name, shard], kept.policy)


def _shard_bytes(
    kept: RowKeeping | None, name: str, shard: int, count: int, width: int, step: SparseStep
) -> int:
    floats = record_floats(step, width)
    cache = _cache_of(kept, name, shard, count, width)
    if cache is None:
        return count * 4 * floats
    if isinstance(kept, TablePrecision):
        packed = row_bytes(width, kept.form) + 4 * (floats - width)
        return count * packed + cache.slots * 4 * width + cache.held_bytes
    return cache.slots * 4 * floats + cache.held_bytes + held_of_blocks(count, floats)
