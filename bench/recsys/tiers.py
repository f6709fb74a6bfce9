"""A table larger than its memory: hits and waits, predicted beside measured; how the process grew.

A table of 200,000 rows of 64 floats under row-wise AdaGrad (50 MiB) has 1 MiB of memory; ids are
drawn as Zipf with exponent 1.1, and every block is in the file before the first step. Hits and
blocks are predicted by replaying the ids through the cache's decisions; waits are the blocks that
were not read ahead at the seconds of one, and the rows that were at those of a copy. Both are
probed on the same file in every step: before and after all of them the machine was another one,
whose probes were 16% off.
"""

import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.lib.stamp import LoadStamp, environment
from equipoise.base.arrays import Ints
from equipoise.recsys.optimizer import SparseStep
from equipoise.recsys.shard import make_shard
from equipoise.recsys.tiers.held import TableTiers, file_of
from equipoise.recsys.tiers.rows import FileRows
from equipoise.schedule.tables.placement import TablePlacement
from equipoise.schedule.tiers.cache import SLOT_BYTES, CachePolicy, SetCache
from equipoise.spec.tables.table import TableSpec

ROWS, WIDTH, STEPS, IDS = 200_000, 64, 24, 1024
PROBED = 400
"""Blocks that are read after each step to see what one takes."""
MEMORY_BYTES = 1 << 20
STEP = SparseStep("row-wise-adagrad", lr=0.05)


def trace() -> list[Ints]:
    """Distinct rows of each step."""
    source = np.random.default_rng(0)
    ranks = [source.zipf(1.1, 4 * IDS) for _ in range(STEPS)]
    spread = np.random.default_rng(1).permutation(ROWS)
    return [np.unique(spread[each[each <= ROWS][:IDS] - 1]) for each in ranks]


def predict(
    steps: list[Ints], slots: int, policy: CachePolicy, per_block: int, *, is_ahead: bool
) -> dict[str, int]:
    """Hits and blocks by replay; a block is read for misses, and read again to be written.

    ``waited``: blocks that a step waits for. Those are all of its misses, or, where rows are read
    ahead, what was not asked for because it still lay in a slot, or was written since.
    """
    cache = SetCache(ROWS, slots, policy)
    if policy == "trace":
        cache.expect(steps, 0)

    def count(rows: Ints) -> int:
        return len(np.unique(rows // per_block))

    hits = missed = fetched = waited = written = 0
    asked = steps[0][:0]
    for number, rows in enumerate(steps):
        misses = rows[cache.find(rows) < 0]
        hits += len(rows) - len(misses)
        missed += len(misses)
        waited += count(np.setdiff1d(misses, asked))
        coming = steps[number + 1] if is_ahead and number + 1 < len(steps) else rows[:0]
        asked = coming[cache.find(coming) < 0]
        fetched += count(asked)
        admission = cache.admit(rows)
        for gone in (admission.leaving, rows[admission.slots < 0]):
            written += count(gone)
            asked = np.setdiff1d(asked, gone)
    return {
        "hits": hits,
        "missed": missed,
        "waited": waited,
        "blocks_read": fetched + waited + written,
        "blocks_written": written,
    }


def probe_s(file: FileRows, source: np.random.Generator, *, is_ahead: bool) -> float:
    """Seconds of a block, over one read of blocks drawn at random, which counts as no step's.

    Args:
        file: Of the rows.
        source: Draws the blocks.
        is_ahead: Whether they were fetched before, so that a read copies a row of each.
    """
    blocks = np.sort(source.choice(ROWS // file.per_block, PROBED, replace=False))
    counts = file.stall_s, file.rows_read, file.file.blocks_read
    rows = blocks * file.per_block
    if is_ahead:
        file.fetch(rows)
        compute()
    began = time.perf_counter()
    file.read(torch.from_numpy(rows))
    taken_s = time.perf_counter() - began
    file.stall_s, file.rows_read, file.file.blocks_read = counts
    return taken_s / PROBED


def compute() -> None:
    """The dense part of a step."""
    torch.randn(800, 800) @ torch.randn(800, 800)


def load_loops() -> None:
    """Load the compiled loops of tables: 100 MB of numba in a process, whatever its tables hold."""
    placement = TablePlacement(TableSpec("t", 8, WIDTH), "table", (0,))
    shard = make_shard(placement, 0, STEP, 0, torch.device("cpu"))
    rows = torch.arange(2)
    shard.pool(rows, torch.tensor([2]), is_training=True)
    shard.apply(STEP, rows, torch.ones(2, WIDTH), number=1)


def run(policy: CachePolicy, *, is_ahead: bool) -> dict[str, Any]:
    """Train the steps; what was predicted, what was measured."""
    steps, slots = trace(), MEMORY_BYTES // (4 * (WIDTH + 1) + SLOT_BYTES)
    placement = TablePlacement(TableSpec("t", ROWS, WIDTH), "table", (0,))
    with tempfile.TemporaryDirectory() as folder:
        tiers = TableTiers(Path(folder), {("t", 0): slots}, policy)
        shard = make_shard(placement, 0, STEP, 0, torch.device("cpu"), tiers)
        held, file = shard.held, file_of(shard.held)
        if held is None or file is None:
            raise TypeError(type(shard))
        predicted = predict(steps, slots, policy, file.per_block, is_ahead=is_ahead)
        held.cache.expect(steps, 0)
        for begin in range(0, ROWS, 10_000):
            at = torch.arange(begin, begin + 10_000)
            file.write(at, file.read(at), 0)
        probes: dict[bool, list[float]] = {False: [], True: []}
        source = np.random.default_rng(2)
        file.stall_s, file.file.blocks_read, file.file.blocks_written = 0.0, 0, 0
        stamp, began, busy, left_out = LoadStamp(), time.perf_counter(), 0.0, 0.0
        for number, rows in enumerate(steps):
            at = torch.from_numpy(rows)
            shard.pool(at, torch.tensor([len(at)]), is_training=True)
            probed = time.perf_counter()
            for is_copied, each in probes.items():  # before anything is fetched for the next step
                each.append(probe_s(file, source, is_ahead=is_copied))
            left_out += time.perf_counter() - probed
            if is_ahead and number + 1 < STEPS:
                coming = steps[number + 1]
                file.fetch(coming[held.cache.find(coming) < 0])
            computing = time.perf_counter()
            compute()
            busy += time.perf_counter() - computing
            shard.apply(STEP, at, torch.ones(len(at), WIDTH), number=number + 1)
        total = time.perf_counter() - began - left_out
        measured = {
            "hits": held.hits,
            "blocks_read": file.file.blocks_read,
            "blocks_written": file.file.blocks_written,
        }
        waited = file.stall_s
        block_s, copy_s = (sum(probes[key]) / STEPS for key in (False, True))
    misses = held.reads - held.hits
    return {
        "policy": policy,
        "rows_fetched_ahead": is_ahead,
        "hit_rate": {
            "predicted": predicted["hits"] / held.reads,
            "measured": measured["hits"] / held.reads,
        },
        "blocks": {"predicted": predicted, "measured": measured},
        "block_s": block_s,
        "row_read_ahead_s": copy_s,
        "wait_s": {
            "predicted": predicted["waited"] * block_s + is_ahead * predicted["missed"] * copy_s,
            "measured": waited,
        },
        "seconds": total,
        "dense_s": busy,
        "held_bytes": held.held_bytes,
        "read_amplification": measured["blocks_read"] * 4096 / (misses * 4 * (WIDTH + 1)),
        "other_load": stamp.other_load(),
    }


def main() -> None:
    """Print the report."""
    torch.set_num_threads(1)
    compute()
    load_loops()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = [run("lru", is_ahead=False), run("lru", is_ahead=True)]
    report = {
        "what": "a table of 50 MiB in 1 MiB of memory and a file",
        "goal": {"hit rate and wait": "predicted within 15%"},
        "environment": environment(),
        "table_bytes": ROWS * 4 * (WIDTH + 1),
        "process_grew_bytes": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
        "runs": rows,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
