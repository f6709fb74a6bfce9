"""Rows that sessions share on ML-100K: by order and batch, in bytes and in quality.

``python -m bench.recsys.sessions 0 1`` trains these seeds alone. Samples of a distinct row are sums
over an epoch, so they are the ratio that the byte ledger shows; means over batches would flatter.
"""

import io
import json
import sys
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from bench.lib.stamp import LoadStamp, environment
from bench.recsys.training import recipe, spread, train
from equipoise.base.arrays import Ints
from equipoise.recsys.columns import read_ml_100k
from equipoise.recsys.embedding import ShardedTables
from equipoise.recsys.exchange import TableExchange
from equipoise.recsys.optimizer import SparseStep
from equipoise.recsys.samples import Samples
from equipoise.recsys.sessions.inverse import share_rows
from equipoise.recsys.sessions.order import find_sessions, shuffle_sessions
from equipoise.schedule.tables.placement import TablePlacement, TablePlan
from equipoise.spec.tables.table import TableSpec

SEEDS, EPOCHS, BATCH = (0, 1, 2, 3, 4), 1, 512
USER = ("user_id", "gender", "occupation", "zip3", "age5")
ITEM = ("item_id", "release_year", "genres")


def orders(samples: Samples) -> dict[str, Ints]:
    """An epoch's order: samples shuffled, in time, sessions shuffled."""
    source = np.random.default_rng(0)
    return {
        "samples shuffled": samples.order(source, "samples"),
        "in time": np.arange(samples.edges[1]),
        "sessions shuffled": samples.order(source, "sessions"),
    }


def samples_a_row(samples: Samples) -> dict[str, Any]:
    """Samples of a distinct row, for users' columns and for items', by order and batch."""
    shown: dict[str, Any] = {}
    for name, order in orders(samples).items():
        for batch in (256, 1024, 4096):
            rows = np.zeros(2, dtype=np.int64)
            for begin in range(0, len(order), batch):
                jagged, _, _ = samples.batch(order[begin : begin + batch])
                rows += share_rows(jagged, [USER, ITEM]).group_rows[:2]
            users, items = len(order) / rows
            shown[f"{name}, batch {batch:,}"] = {"users": users, "items": items}
    return shown


def stored_bytes() -> dict[str, Any]:
    """Parquet with zstd, ratings joined with users and films, by the order of rows."""
    columns = read_ml_100k()
    stamps = columns["timestamp"].astype(np.float64)
    by_time = np.argsort(stamps, kind="stable")
    columns = {name: values[by_time] for name, values in columns.items()}
    sessions = find_sessions(columns["user_id"], stamps[by_time], 1800.0, "ml-100k")
    source = np.random.default_rng(0)
    ways = {
        "samples shuffled": source.permutation(len(stamps)),
        "in time": np.arange(len(stamps)),
        "sessions together": shuffle_sessions(sessions, source),
    }
    sizes = {}
    for name, order in ways.items():
        table = pa.table({key: pa.array(values[order]) for key, values in columns.items()})
        out = io.BytesIO()
        pq.write_table(table, out, compression="zstd", row_group_size=10_000)
        sizes[name] = out.tell()
    return {"sessions": int(sessions.max()) + 1, "bytes": sizes}


def step_seconds(samples: Samples) -> dict[str, Any]:
    """Lookups, sums and updates of all tables, interleaved: with distinct rows and without."""
    tables = [TableSpec(n, samples.rows[samples.keys.index(n)], 64, 1.0) for n in samples.keys]
    plan = TablePlan(tuple(TablePlacement(t, "table", (0,)) for t in tables), 1)
    order, stamp = orders(samples)["sessions shuffled"], LoadStamp()
    held = {
        name: ShardedTables(plan, TableExchange(alone=True), SparseStep("row-wise-adagrad"))
        for name in ("plain", "shared")
    }
    spent = dict.fromkeys(held, 0.0)
    for begin in range(0, 20 * 4096, 4096):
        jagged, _, _ = samples.batch(order[begin : begin + 4096])
        for name, each in held.items():
            began = time.perf_counter()
            batch = share_rows(jagged, [USER, ITEM]) if name == "shared" else jagged
            each(batch).sum().backward()
            each.step()
            spent[name] += time.perf_counter() - began
    return {
        "seconds": spent,
        "times_faster": spent["plain"] / spent["shared"],
        "beside": "published: 2.49x of a whole training step on accelerators",
        "other_load": stamp.other_load(),
    }


def quality(seeds: list[int]) -> dict[str, Any]:
    """The last tenth by time, after the same steps in both orders."""
    spec, samples = recipe()
    step = SparseStep("adam", lr=spec.tables.lr)
    shown = {}
    for shuffle in ("samples", "sessions"):
        ended = [
            train(spec, samples, seed=s, epochs=EPOCHS, batch=BATCH, step=step, shuffle=shuffle)
            for s in seeds
        ]
        shown[shuffle] = {
            "auc": spread([each.auc for each in ended]),
            "entropy": spread([each.entropy for each in ended]),
            "by_seed": [[each.auc, each.entropy] for each in ended],
        }
    return shown


def main() -> None:
    """Print the report."""
    torch.set_num_threads(1)
    seeds = [int(each) for each in sys.argv[1:]] or list(SEEDS)
    _, samples = recipe()
    report = {
        "what": "ML-100K by time; sessions are a user's ratings with pauses of at most 30 minutes",
        "environment": environment(),
        "samples_a_row": samples_a_row(samples),
        "parquet": stored_bytes(),
        "tables_alone": step_seconds(samples),
        "seeds": seeds,
        "quality": quality(seeds),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
