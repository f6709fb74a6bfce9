"""DLRM on two ranks beside torchrec 1.8 over fbgemm-gpu-cpu 1.8: samples a second, and weights.

``TORCHREC_PYTHON`` names the interpreter of an environment with torch 2.13, ``torchrec==1.8.0`` and
``fbgemm-gpu-cpu==1.8.0``; without it our side is measured alone. Both sides train the same model
from the same weights on the same batches: tables whole on the same ranks under row-wise AdaGrad,
the dense part under Adam, one thread a rank, gloo. Both cut their batches from the same arrays
while they train; ``ready`` gives torchrec batches that were cut before, which ours never has.
Sides alternate.

Both are compared with one process in float64, and with each other. The bench fails where losses or
tables of the two are further than 1e-5 apart, so also where torchrec has chosen its dense kernel,
which drops the tables' optimizer, where a table ends further than 1e-5 from float64, or where the
dense part ends further than 1e-4 from the other's or from float64.
"""

import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import equipoise
from bench.lib.stamp import LoadStamp, environment, spread
from bench.recsys.in_float64 import train_in_float64
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.observe.journal import EventSink
from equipoise.recsys.exchange import TimedExchange
from equipoise.recsys.models.dlrm import DLRM
from equipoise.recsys.samples import Samples
from equipoise.recsys.shard import draw_rows
from equipoise.recsys.trainer import RankTrainer, draw_order
from equipoise.schedule.tables.placement import TablePlacement, TablePlan
from equipoise.spec.recommend import RecommendSpec
from equipoise.spec.tables.table import TableSpec

RANK = Path(__file__).with_name("torchrec_rank.py")
TABLES, ROWS, WIDTH, NUMBERS = 8, 50_000, 32, 8
BATCH, STEPS, WARM, ROUNDS = 1024, 64, 8, 4
IDS = (1, 1, 2, 4, 8, 8, 12, 16)
"""Mean ids of a sample, table by table; every fifth bag is empty where they are more than 1."""
_MOST_APART = 1e-5
_BETWEEN = "torchrec, from ours"
_MOST_DENSE = 1e-4
"""How far the dense part may be from float64: Adam divides by the root of a square, so a gradient
that is all rounding moves its weight as far as a large one does. On one processor both sides end
3.6e-5 from it and 1.3e-7 from each other; on another ours ends 5e-7 from it and torchrec 3.6e-5."""


def make_samples() -> Samples:
    """Skewed ids and labels that follow from them, one batch more than there are steps."""
    source = np.random.default_rng(0)
    count = BATCH * (STEPS + 1)
    held = count // 8
    total = count + 2 * held
    keys, offsets, ids = [], [], []
    taste = source.standard_normal(TABLES)
    lean = np.zeros(total)
    for table, mean in enumerate(IDS):
        sizes = np.ones(total, dtype=np.int64)
        if mean > 1:
            sizes = source.integers(1, 2 * mean, total)
            sizes[source.random(total) < 0.2] = 0
        ends = np.concatenate(([0], np.cumsum(sizes)))
        skewed = source.random(int(ends[-1])) ** 4
        drawn = 1 + np.minimum(((ROWS - 1) * skewed).astype(np.int64), ROWS - 2)  # 0: unknown
        owner = np.repeat(np.arange(total), sizes)
        lean += taste[table] * np.bincount(owner, drawn % 7 < 3, total) / mean
        keys.append(f"t{table}")
        offsets.append(ends)
        ids.append(drawn)
    numbers = source.standard_normal((total, NUMBERS)).astype(np.float32)
    labels = (source.random(total) < 1 / (1 + np.exp(-lean))).astype(np.float32)
    edges = (0, count, count + held, total)
    return Samples(
        tuple(keys), (ROWS,) * TABLES, tuple(offsets), tuple(ids), numbers, labels, edges
    )


def make_spec() -> RecommendSpec:
    """The run."""
    spec = RecommendSpec(name="beside")
    return replace(
        spec,
        model=replace(spec.model, width=WIDTH, bottom=(64,), top=(128, 64), pooling="sum"),
        tables=replace(spec.tables, optimizer="row-wise-adagrad", lr=0.02),
        train=replace(spec.train, batch=BATCH, lr=1e-3),
        checkpoint=replace(spec.checkpoint, every_steps=1 << 30),
    )


def make_plan() -> TablePlan:
    """Whole tables, by their ids dealt to two ranks."""
    owners = [0, 1, 0, 1, 0, 1, 1, 0]
    tables = [TableSpec(f"t{at}", ROWS, WIDTH, float(IDS[at])) for at in range(TABLES)]
    placed = [TablePlacement(t, "table", (r,)) for t, r in zip(tables, owners, strict=True)]
    return TablePlan(tuple(placed), 2)


def train_ours(ranks: Ranks, is_early: bool) -> dict[str, Any]:
    """A rank of ours: seconds, losses and its weights at the end."""
    torch.set_num_threads(1)
    samples, spec, plan = make_samples(), make_spec(), make_plan()
    exchange = TimedExchange()
    with tempfile.TemporaryDirectory() as folder:
        trainer = RankTrainer(
            Path(folder), spec, samples, plan, EventSink(), exchange, is_early=is_early
        )
        trainer.run(lambda _: None, stop_at=WARM)
        ranks.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        trained = trainer.run(lambda _: None, stop_at=STEPS)
        ranks.barrier()
        took, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    weights = {f"table {s.table.name}": s.weight.numpy() for s in trainer.tables.shards}
    weights |= {f"dense {k}": v.numpy() for k, v in trainer.dense.state_dict().items()}
    return {"seconds": took, "cpu_s": cpu_s, "losses": trained.losses, "weights": weights}


def write_given(file: Path, *, ready: bool) -> None:
    """What the other side reads."""
    samples, spec, plan = make_samples(), make_spec(), make_plan()
    tables = [each.table for each in plan.placements]
    dense = DLRM(tables, NUMBERS, bottom=spec.model.bottom, top=spec.model.top, seed=0)
    given: dict[str, Any] = {"numbers": samples.numbers, "labels": samples.labels}
    for table, offsets, ids in zip(tables, samples.offsets, samples.ids, strict=True):
        given[f"table {table.name}"] = draw_rows(table, np.arange(table.rows), 0)
        given |= {f"offsets {table.name}": offsets, f"ids {table.name}": ids}
    given |= {f"dense {k}": v.numpy() for k, v in dense.state_dict().items()}
    given["order"] = draw_order(spec, samples, 0)
    facts = {
        "keys": [table.name for table in tables],
        "rows": [table.rows for table in tables],
        "owner": [each.ranks[0] for each in plan.placements],
        "width": WIDTH,
        "numbers": NUMBERS,
        "bottom": spec.model.bottom,
        "top": spec.model.top,
        "lr": spec.tables.lr,
        "dense_lr": spec.train.lr,
        "batch": BATCH,
        "steps": STEPS,
        "warm": WARM,
        "ready": ready,
    }
    np.savez(file, facts=np.array(json.dumps(facts)), **given)


def train_theirs(python: str, file: Path) -> list[Any]:
    """Both ranks of torchrec's."""
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        port = str(at.getsockname()[1])
    source = str(Path(equipoise.__file__).parents[1])
    given = {**os.environ, "PYTHONPATH": source}
    ranks = [
        subprocess.Popen([python, str(RANK), str(file), str(rank), port], env=given)
        for rank in (0, 1)
    ]
    if any(each.wait(600) for each in ranks):
        raise SystemExit("torchrec's ranks did not end well")
    return [dict(np.load(file.with_name(f"torchrec-{rank}.npz"))) for rank in (0, 1)]


def train_exactly() -> dict[str, Any]:
    """Weights of one process in float64."""
    samples, spec, plan = make_samples(), make_spec(), make_plan()
    tables = [each.table for each in plan.placements]
    dense = DLRM(tables, NUMBERS, bottom=spec.model.bottom, top=spec.model.top, seed=0)
    order = draw_order(spec, samples, 0)
    first = [draw_rows(table, np.arange(table.rows), 0) for table in tables]
    batches = [order[at * BATCH : (at + 1) * BATCH] for at in range(STEPS)]
    return train_in_float64(spec, samples, first, dense, batches)


def join_weights(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Weights of all ranks of ours."""
    return {key: value for row in rows for key, value in row["weights"].items()}


def measure_off(rows: list[Any], exact: dict[str, Any]) -> dict[str, float]:
    """How far tables and dense weights of all ranks are from those in float64."""
    off = {
        key: np.abs(value - exact[key])
        for row in rows
        for key, value in row.items()
        if key.startswith(("table ", "dense "))
    }
    if missing := set(exact) - set(off):
        raise SystemExit(f"No rank has {sorted(missing)}.")
    return {
        "tables": max(float(off[key].max()) for key in off if key.startswith("table ")),
        "dense": max(float(off[key].max()) for key in off if key.startswith("dense ")),
        "table_rows_beyond_1e-5": sum(
            int((off[key] > _MOST_APART).any(axis=1).sum())
            for key in off
            if key.startswith("table ")
        ),
    }


def require_equal(losses: float, off: dict[str, dict[str, float]]) -> None:
    """Stop where a side did not train the same model."""
    wrong = [
        name
        for name, each in off.items()
        if each["tables"] > _MOST_APART or each["dense"] > _MOST_DENSE
    ]
    if losses > _MOST_APART or wrong:
        raise SystemExit(f"{wrong} differ. Losses: {losses}; weights: {off}")


def main() -> None:
    """Print the report."""
    python, stamp = os.environ.get("TORCHREC_PYTHON"), LoadStamp()
    timed = BATCH * (STEPS - WARM)
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as room:
        files = {ready: Path(room) / f"given-{ready}.npz" for ready in (False, True)}
        for ready, file in files.items():
            write_given(file, ready=ready)
        exact = train_exactly()
        off: dict[str, dict[str, float]] = {}
        losses = 0.0
        for _ in range(ROUNDS):
            for name, is_early in (("ours", True), ("ours, steps one by one", False)):
                ours = run_ranks(2, train_ours, is_early)
                off[name] = measure_off([join_weights(ours)], exact)
                rates.setdefault(name, []).append(timed / max(r["seconds"] for r in ours))
            if python is None:
                continue
            for ready, file in files.items():
                theirs = train_theirs(python, file)
                name = "torchrec, batches ready" if ready else "torchrec"
                rates.setdefault(name, []).append(timed / max(float(r["seconds"]) for r in theirs))
                off[name] = measure_off(theirs, exact)
                off[_BETWEEN] = measure_off(theirs, join_weights(ours))
                apart = np.abs(np.subtract(ours[0]["losses"], theirs[0]["losses"])).max()
                losses = max(losses, float(apart))
            require_equal(losses, off)
    report = {
        "what": f"DLRM, {TABLES} tables of {ROWS:,} x {WIDTH}, batch {BATCH}, two ranks",
        "goal": {"ours over torchrec": 1.0},
        "environment": environment(),
        "samples_per_s": {name: spread(each) for name, each in rates.items()},
        "ours_over": {
            name: statistics.median(a / b for a, b in zip(rates["ours"], each, strict=True))
            for name, each in rates.items()
            if name != "ours"
        },
        "steps": STEPS,
        "losses_apart": losses,
        "largest_difference": off,
        "other_load": stamp.other_load(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
