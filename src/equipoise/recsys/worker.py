"""The program of one rank of a recommender: ``python -m equipoise.recsys.worker RUN``.

Kept true (tests/multi/recsys/test_train.py, tests/multi/recsys/test_recover.py)
    The record holds traffic as predicted and measured; a rank that dies is named and replaced.
"""

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

import equipoise
from equipoise.balance.tables.plan import TableAnswer
from equipoise.base.durable import write_whole
from equipoise.base.errors import EquipoiseError, LayoutError
from equipoise.base.shown import counted
from equipoise.comm.group import Ranks, join_from_environment
from equipoise.cost.recommend import TableRates
from equipoise.fault.rank import RankWords, WatchedJournal, complain, hold_folder
from equipoise.launch.agent import end_with_agent
from equipoise.launch.last_words import say_process
from equipoise.launch.leave import run_and_leave
from equipoise.observe.journal import Journal
from equipoise.recsys.exchange import TimedExchange
from equipoise.recsys.folder import held_rates, read_prepared, read_trained
from equipoise.recsys.foresight.forecast import count_shards
from equipoise.recsys.place import plan_samples, predict_traffic
from equipoise.recsys.samples import Samples, read_samples
from equipoise.recsys.sessions.sharing import table_groups
from equipoise.recsys.tiers.run import count_bytes, count_held
from equipoise.recsys.trainer import RankTrainer
from equipoise.schedule.tables.placement import TablePlan
from equipoise.spec.names import RECOMMEND
from equipoise.spec.recommend import RecommendSpec

AHEAD = ("torch._dynamo",)
"""What a first step would import: torch's compiler, which optimizers load (torch 2.13)."""


def train_rank(
    ranks: Ranks,
    folder: Path,
    spec: RecommendSpec,
    samples: Samples,
    plan: TablePlan,
    journal: Journal,
    is_quiet: bool,
    stop_at: int | None = None,
) -> dict[str, Any]:
    """One rank of a run, from its newest checkpoint to what it measured."""
    trainer = RankTrainer(folder, spec, samples, plan, journal, TimedExchange())
    with journal.phase("load"):
        resumed = trainer.resume()
    journal.write(
        "instant",
        "start",
        world=ranks.world,
        resumed_step=resumed,
        epoch=0 if journal.fence is None else journal.fence.epoch,
        version=equipoise.__version__,
        spec=dataclasses.asdict(spec),
    )

    def show(line: str) -> None:
        if ranks.rank == 0 and not is_quiet:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    for sentence in trainer.damaged:
        show(f"{sentence} Passed over.")
        if ranks.rank == 0:
            journal.write("fault", "torn-checkpoint", message=sentence)
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
        "held_bytes": count_bytes(trainer.tables),
        "predicted_hits": trainer.predict_hits(),
        "dense_sent": {stage: b / steps for stage, b in trainer.dense_part.sent.items()},
    }
    journal.write(
        "scalar",
        "tables",
        steps=trained.traffic.steps,
        ids=measured["ids"],
        sent_bytes=measured["sent_bytes"],
    )
    journal.write("instant", "stop", step=trained.step, reason=trained.reason)
    best = None if trained.best is None else dataclasses.asdict(trained.best)
    return {"measured": measured, "step": trained.step, "losses": trained.losses, "best": best}


def make_record(
    folder: Path,
    spec: RecommendSpec,
    samples: Samples,
    answer: TableAnswer,
    rows: list[dict[str, Any]],
    rates: TableRates | None = None,
) -> dict[str, Any]:
    """What ``recommend.json`` holds of a run; ``rates`` placed its tables, assumed unless given."""
    placed_by = rates or TableRates()
    predicted = predict_traffic(spec, samples, answer.plan)
    has_steps = rows[0]["measured"]["steps"] > 0
    before = {} if has_steps else read_trained(folder)
    hosts = np.arange(answer.plan.ranks) // answer.plan.per_host
    away = hosts[:, None] != hosts[None, :]
    traffic = [
        {
            "rank": rank,
            "ids": row["measured"]["ids"],
            "predicted_ids": int(predicted["ids"][rank]),
            "sent_bytes": sum(row["measured"]["sent_bytes"]),
            "predicted_sent_bytes": int(predicted["bytes"][rank].sum()),
            "across_bytes": float(np.sum(np.asarray(row["measured"]["sent_bytes"])[away[rank]])),
            "predicted_across_bytes": int(predicted["bytes"][rank][away[rank]].sum()),
            "held_bytes": row["measured"]["held_bytes"],
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
                "columns": list(each.column_edges) if each.kind == "column" else None,
            }
            for each in answer.plan.placements
        ],
        "plan": {"skew": answer.skew, "gap": answer.gap},
        "placed_by": dataclasses.asdict(placed_by),
        "hosts": answer.plan.hosts,
        "towers": [list(each.tables) for each in answer.plan.towers],
        "step": rows[0]["step"],
        "losses": rows[0]["losses"],
        "best": rows[0]["best"],
        **(
            {
                "traffic": traffic,
                "sharing": _sharing(spec, rows),
                "held": _held(spec, rows),
                "dense": _dense(spec, samples, answer, rows),
            }
            if has_steps
            else {name: before.get(name, []) for name in ("traffic", "sharing", "held", "dense")}
        ),
    }


def _dense(
    spec: RecommendSpec, samples: Samples, answer: TableAnswer, rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What each rank sends in a mean step for a dense part in shards; empty where it has copies."""
    shards = count_shards(spec, samples, answer.plan)
    if shards is None:
        return []

    def inside(sent: Mapping[str, float]) -> float:
        return sent["gather"] + sent["scatter"]

    return [
        {
            "rank": rank,
            "inside_bytes": inside(row["measured"]["dense_sent"]),
            "predicted_inside_bytes": inside(shards.sent),
            "across_bytes": row["measured"]["dense_sent"]["across"],
            "predicted_across_bytes": shards.sent["across"],
        }
        for rank, row in enumerate(rows)
    ]


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


def run_facts(spec: RecommendSpec, samples: Samples, plan: TablePlan) -> dict[str, str]:
    """What must be the same on every rank of a run, by the names that a user knows."""
    return {
        "equipoise": equipoise.__version__,
        "torch": torch.__version__,
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "the run": json.dumps(dataclasses.asdict(spec)),
        "the samples": samples.digest(),
        "where tables lie": str(
            [(p.table.name, p.kind, p.ranks, p.column_edges) for p in plan.placements]
        ),
    }


def main() -> int:
    """Run one rank; the exit code of what happened."""
    parser = argparse.ArgumentParser(prog="python -m equipoise.recsys.worker")
    parser.add_argument("run", type=Path, help="folder with spec.json")
    parser.add_argument("--quiet", action="store_true", help="say nothing after an epoch")
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    folder: Path = args.run
    end_with_agent()
    say_process(rank)
    words = RankWords(folder, (folder,), rank)
    try:
        with ExitStack() as stack, words.told():
            torch.set_num_threads(1)
            spec, base = read_prepared(folder)
            samples = read_samples(spec.data, base)
            rates = held_rates(folder)
            answer = plan_samples(spec, samples, rates)
            joined = join_from_environment(
                run_facts(spec, samples, answer.plan),
                deadline_s=spec.layout.deadline_s,
                tell=words.tell,
                tell_late=words.tell_late,
            )
            ranks, watchdog = stack.enter_context(joined)
            if ranks.world != spec.layout.dp:
                raise LayoutError(
                    f"torchrun started {counted(ranks.world, 'rank')} and the run wants "
                    f"{spec.layout.dp:,}. "
                    f"Pass --nproc-per-node {spec.layout.dp}."
                )
            fence = words.fence = stack.enter_context(hold_folder(folder, ranks))
            with WatchedJournal(folder / "journal", rank, watchdog, fence) as journal:
                row = train_rank(ranks, folder, spec, samples, answer.plan, journal, args.quiet)
            rows = ranks.gather_objects(row)
            if rank == 0:
                record = make_record(folder, spec, samples, answer, rows, rates)
                write_whole(folder / RECOMMEND, json.dumps(record, indent=1))
            ranks.barrier()
    except EquipoiseError as error:
        complain(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    run_and_leave(main)
