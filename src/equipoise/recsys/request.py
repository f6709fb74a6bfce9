"""A recommender from a run.toml to its record: what ``equipoise train`` does for such a run.

What it decides
    Samples are read and tables planned before a rank starts, so what is wrong is said once. Ranks
    are processes on this machine; asked again, a run goes on from its newest whole checkpoint,
    also on another number of ranks.

Kept true (tests/multi/recsys/test_train.py)
    A run of two ranks ends above the floor; the record holds traffic as predicted and measured.
"""

import dataclasses
import fcntl
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import equipoise
from equipoise.balance.tables.plan import TableAnswer, plan_tables
from equipoise.balance.tables.price import TableMachine
from equipoise.base.arrays import Ints
from equipoise.base.durable import write_whole
from equipoise.base.errors import CheckpointError, LayoutError
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.observe.journal import Journal
from equipoise.recsys.exchange import TableExchange
from equipoise.recsys.samples import Samples, read_samples
from equipoise.recsys.sessions.sharing import predict_loads, table_groups
from equipoise.recsys.tiers.run import count_held
from equipoise.recsys.trainer import RankTrainer
from equipoise.schedule.tables.placement import TablePlan
from equipoise.schedule.tables.traffic import count_traffic
from equipoise.spec.names import RECOMMEND
from equipoise.spec.recommend import RecommendSpec
from equipoise.spec.tables.table import TableSpec

_MEMORY_BYTES_PER_S, _LINK_BYTES_PER_S = 1e10, 2e9
"""Assumed of a core and of gloo between two processes of one machine: only their ratio decides."""
_SAME = (
    "data",
    "model",
    "train.batch",
    "train.seed",
    "train.lr",
    "train.shuffle",
    "tables.optimizer",
    "tables.precision",
    "tables.rounding",
    "tables.cache",
    "tables.cache_policy",
    "tables.memory_mib",
)
"""What a run that goes on must not change."""


def plan_samples(spec: RecommendSpec, samples: Samples) -> TableAnswer:
    """Place the tables of some samples by the lookups of their training part."""
    means = samples.ids_per_sample()
    tables = [
        TableSpec(key, rows, spec.model.width, means[key], spec.model.pooling)
        for key, rows in zip(samples.keys, samples.rows, strict=True)
    ]
    machine = TableMachine(
        spec.layout.dp,
        max(1, spec.train.batch // spec.layout.dp),
        _MEMORY_BYTES_PER_S,
        _LINK_BYTES_PER_S,
        _LINK_BYTES_PER_S,
        optimizer=spec.tables.optimizer,
        wire=spec.tables.wire,
    )
    kinds = [k for k in spec.tables.kinds if spec.tables.precision == "fp32" or k != "column"]
    return plan_tables(tables, machine, kinds=kinds, row_counts=samples.row_counts())


def predict_traffic(spec: RecommendSpec, samples: Samples, plan: TablePlan) -> dict[str, Ints]:
    """Bytes of a mean step, from each rank to each other, and ids that each rank looks up.

    Returns:
        ``bytes`` int64 [from, to]; ``ids`` int64 [ranks].
    """
    ranks = plan.ranks
    loads = predict_loads(spec, samples, ranks)
    ids: dict[str, Ints] = {}
    touched: dict[str, Ints] = {}
    looked_up = np.zeros(ranks)
    for each in plan.placements:
        lookups, row_map = loads.lookups[each.table.name], each.row_map
        of_shard = [lookups[row_map.rows_of(shard)].sum() for shard in range(row_map.shards)]
        per_rank = np.array(of_shard) / ranks
        ids[each.table.name] = np.rint(np.tile(per_rank, (ranks, 1))).astype(np.int64)
        of_rank, of_all = loads.distinct[each.table.name]
        count, distinct = (ranks, of_rank) if each.kind == "data" else (1, of_all)
        touched[each.table.name] = np.full(count, round(distinct), dtype=np.int64)
        if each.kind == "data":
            continue
        for shard, rank in enumerate(each.ranks):
            looked_up[rank] += per_rank[each.row_shard(shard)] * ranks
    wire = spec.tables.wire
    stages = count_traffic(
        plan,
        {name: [round(size)] * ranks for name, size in loads.sizes.items()},
        ids,
        touched,
        forward=wire,
        backward=wire,
        is_row_wise=spec.tables.optimizer == "row-wise-adagrad",
        groups=loads.groups,
    )
    total = np.sum(list(stages.values()), axis=0)
    return {"bytes": total, "ids": np.rint(looked_up).astype(np.int64)}


def run(
    spec: RecommendSpec, base: Path, *, out: Path | None = None, is_quiet: bool = True
) -> dict[str, Any]:
    """Train, or go on.

    Args:
        spec: The run.
        base: Where its relative paths begin.
        out: Its folder; ``runs/NAME`` unless given.
        is_quiet: Whether rank 0 says nothing after an epoch.

    Returns:
        The record, as ``recommend.json`` in the run's folder holds it.

    Raises:
        DataError: a file or a column is wrong.
        FitError: the tables fit no rank.
        CheckpointError: the folder holds another run.
    """
    folder = out or Path("runs") / spec.name
    samples = read_samples(spec.data, base)
    answer = plan_samples(spec, samples)
    if not is_quiet:
        sys.stdout.write(_describe(spec, samples, answer))
    with _own_folder(folder):
        _require_same(folder, spec)
        rows = run_ranks(spec.layout.dp, train_rank, folder, spec, base, answer.plan, is_quiet)
        record = _record(folder, spec, samples, answer, rows)
        write_whole(folder / RECOMMEND, json.dumps(record, indent=1))
    return record


def train_rank(
    ranks: Ranks,
    folder: Path,
    spec: RecommendSpec,
    base: Path,
    plan: TablePlan,
    is_quiet: bool,
    stop_at: int | None = None,
) -> dict[str, Any]:
    """One rank of a run, from its samples to what it measured."""
    torch.set_num_threads(1)
    samples = read_samples(spec.data, base)
    with Journal(folder / "journal", ranks.rank) as journal:
        exchange = TableExchange()
        trainer = RankTrainer(folder, spec, samples, plan, journal, exchange)
        resumed = trainer.resume()

        def show(line: str) -> None:
            if ranks.rank == 0 and not is_quiet:
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()

        if resumed:
            show(f"Going on after step {resumed:,}.")
        trained = trainer.run(show, stop_at)
        steps = max(1, trained.traffic.steps)
        sent = np.sum(list(trained.traffic.sent.values()), axis=0)
        measured = {
            "rank": ranks.rank,
            "steps": trained.traffic.steps,
            "ids": trained.traffic.ids / steps,
            "sent_bytes": (sent / steps).tolist(),
            "samples": trainer.sharing.samples,
            "rows": trainer.sharing.rows,
            "held": count_held(trainer.tables),
            "predicted_hits": trainer.predict_hits(),
        }
        journal.write(
            "scalar",
            "tables",
            steps=trained.traffic.steps,
            ids=measured["ids"],
            sent_bytes=measured["sent_bytes"],
        )
    best = None if trained.best is None else dataclasses.asdict(trained.best)
    return {"measured": measured, "step": trained.step, "losses": trained.losses, "best": best}


def _record(
    folder: Path,
    spec: RecommendSpec,
    samples: Samples,
    answer: TableAnswer,
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    predicted = predict_traffic(spec, samples, answer.plan)
    has_steps = rows[0]["measured"]["steps"] > 0
    before = {} if has_steps else _read(folder)
    traffic = [
        {
            "rank": rank,
            "ids": row["measured"]["ids"],
            "predicted_ids": int(predicted["ids"][rank]),
            "sent_bytes": sum(row["measured"]["sent_bytes"]),
            "predicted_sent_bytes": int(predicted["bytes"][rank].sum()),
            "held_bytes": int(answer.held_bytes[rank]),
        }
        for rank, row in enumerate(rows)
    ]
    start, end = samples.edges[1], samples.edges[3]
    return {
        "version": equipoise.__version__,
        "run": str(folder),
        "spec": dataclasses.asdict(spec),
        "samples": {"train": start, "held_out": end - start, "by_time": bool(spec.data.time)},
        "tables": [
            {
                "name": each.table.name,
                "rows": each.table.rows,
                "width": each.table.width,
                "ids_per_sample": each.table.ids_per_sample,
                "kind": each.kind,
                "ranks": list(each.ranks),
                "buckets": each.buckets if each.row_shards > 1 else None,
            }
            for each in answer.plan.placements
        ],
        "plan": {"skew": answer.skew, "gap": answer.gap},
        "step": rows[0]["step"],
        "losses": rows[0]["losses"],
        "best": rows[0]["best"],
        "traffic": before.get("traffic", traffic),
        "sharing": before.get("sharing", _sharing(spec, rows)),
        "held": before.get("held", _held(spec, rows)),
    }


def _held(spec: RecommendSpec, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What tables of few bits take, over all ranks, and how often their caches were hit."""
    by_table: dict[str, dict[str, Any]] = {}
    expected: dict[str, tuple[int, int]] = {}
    for name, (hits, reads) in (
        item for row in rows for item in row["measured"]["predicted_hits"].items()
    ):
        before = expected.get(name, (0, 0))
        expected[name] = before[0] + hits, before[1] + reads
    for name, part in (item for row in rows for item in row["measured"]["held"].items()):
        form = "file" if spec.tables.memory_mib else spec.tables.precision
        total = by_table.setdefault(name, {"name": name, "form": form})
        for key, value in part.items():
            total[key] = total.get(key, 0) + value
    for name, (hits, reads) in expected.items():
        by_table[name]["predicted_hit_rate"] = hits / max(1, reads)
    return list(by_table.values())


def _sharing(spec: RecommendSpec, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Samples and distinct rows of each group, over all ranks and steps."""
    return [
        {
            "columns": list(group),
            "samples": sum(row["measured"]["samples"] for row in rows),
            "rows": sum(row["measured"]["rows"][place] for row in rows),
        }
        for place, group in enumerate(table_groups(spec))
    ]


def _read(folder: Path) -> dict[str, Any]:
    file = folder / RECOMMEND
    record: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return record


def _require_same(folder: Path, spec: RecommendSpec) -> None:
    """Refuse to go on with a run of other data, another model or another order of samples."""
    file, ours = folder / "spec.json", json.loads(json.dumps(dataclasses.asdict(spec)))
    if file.is_file():
        theirs = json.loads(file.read_text("utf-8"))
        unset = json.loads(json.dumps(dataclasses.asdict(RecommendSpec())))
        in_files = ("layout", "tables.kinds") if spec.tables.memory_mib else ()
        for name in (*_SAME, *in_files):
            section, _, key = name.partition(".")
            # A key that the run's version did not have had the effect of its default.
            old, new = unset[section] | theirs[section], ours[section]
            if (old[key] != new[key]) if key else (old != new):
                changed = (
                    name
                    if key
                    else next(f"{section}.{field}" for field in new if old.get(field) != new[field])
                )
                raise CheckpointError(
                    f"{folder} holds a run with another {changed}. Give it back its value, or "
                    "choose another folder with --out."
                )
    write_whole(file, json.dumps(ours, indent=1))


@contextmanager
def _own_folder(folder: Path) -> Iterator[None]:
    """Hold the run's folder, so that two runs never write one journal."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LayoutError(
                f"Another run is writing to {folder}. Wait until it ends, or choose another folder "
                "with --out."
            ) from None
        yield


def _describe(spec: RecommendSpec, samples: Samples, answer: TableAnswer) -> str:
    kinds = [each.kind for each in answer.plan.placements]
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return (
        f"{samples.edges[3]:,} samples, {samples.edges[1]:,} of them to train; "
        f"{len(samples.keys)} tables of {sum(samples.rows):,} rows on {spec.layout.dp} ranks "
        f"({counted}), max/mean {answer.skew:.3f}, at most {100 * answer.gap:.1f}% above the best\n"
    )
