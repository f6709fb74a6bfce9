"""Real steps on two ranks beside their predictions after ``equipoise calibrate``.

``equipoise calibrate`` measures the machine once. Then, pass after pass, the parts of one
decoder's steps are timed as it times them, one way of sharing a step at a time, and right after it
one to three plans that share a step so are trained by ``equipoise train``, pinned: eighteen plans
of the decoder (layouts, ZeRO stages, schedules, strategies, packings, recomputation, windows,
depths). Neighbours' use of caches and clocks changes within minutes by more than the goal, so
each run is predicted from what was timed just before it, and a plan's figures are medians over all
its steps but each run's first. Runs taken beside other load are repeated. Nothing is fitted to a
scored run. Processor seconds stand beside wall seconds, because other load lengthens them less.

It works in pieces, kept in a folder until all are there::

    python -m bench.planner.real --seconds 180        # go on for 180 s, print what is left
    python -m bench.planner.real --seconds 0 --now    # the answer from the pieces that are there
    python -m bench.planner.real --fresh              # forget all pieces
    python -m bench.run planner.real                  # whatever is left, and the answer
"""

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.corpus import open_corpus
from bench.lib.stamp import LoadStamp, environment, spread
from bench.planner.real_cases import CASES, COMMON, GROUPS, STEPS, flags
from bench.planner.real_parts import parts_of, time_once
from bench.planner.real_price import foresee
from bench.published.ranking import kendall_tau
from equipoise.launch.agent import whole_environment
from equipoise.sim.machine import Machine
from equipoise.spec.cluster.spec import own_cluster
from equipoise.spec.device.file import read_device_file, write_device_file
from equipoise.spec.device.here import this_cpu
from equipoise.spec.device.parts import Way
from equipoise.spec.layout import Layout

GOAL = {"error": 0.08, "tau": 0.9, "plans": 12}
PASSES = 4
MOST_LOAD_CORES, MOST_DRAWS = 0.15, 3
FOLDER = Path(tempfile.gettempdir()) / f"equipoise-plans-real-{os.getuid()}"
MACHINE_FILE = FOLDER / "this-cpu.json"


def calibrate() -> dict[str, Any]:
    """Measure the machine, without any model."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "equipoise.cli.main", "calibrate", "--out", str(MACHINE_FILE)]
    subprocess.run([*command, "--quiet"], check=True, stdout=sys.stderr)
    return {"seconds": round(time.perf_counter() - begin, 1)}


def samples_file(way: Way, number: int, group: int) -> Path:
    """Samples of one way that a pass timed before a group of plans."""
    return FOLDER / f"{number}-{group}-{way}.pickle"


def calibrated_machine(number: int, group: int) -> Machine:
    """Two cores as they were timed before a group of plans."""
    link = Machine(own_cluster(this_cpu(MACHINE_FILE), 2)).context_links(Layout(cp=2)).near
    ways, _ = GROUPS[group]
    parts = parts_of({way: samples_file(way, number, group) for way in ways}, link)
    file = FOLDER / f"{number}-{group}.json"
    write_device_file(file, dataclasses.replace(read_device_file(MACHINE_FILE), parts=(parts,)))
    return Machine(own_cluster(this_cpu(file), 2))


def draw_group(number: int, group: int) -> dict[str, Any]:
    """Time a group's ways, then train its plans."""
    ways, cases = GROUPS[group]
    loads = {
        way: _undisturbed(partial(time_once, way, samples_file(way, number, group))) for way in ways
    }
    runs: dict[str, Any] = {}

    def draw(case: str) -> float:
        runs[case] = train(case, FOLDER / "run")
        return float(runs[case]["other_load_cores"])

    for case in cases:
        _undisturbed(partial(draw, case))
    return {"other load while ways were timed": loads, "runs": runs}


def _undisturbed(draw: Callable[[], float]) -> float:
    """Repeat until other load is low, ``MOST_DRAWS`` times at most; returns that load."""
    for _ in range(MOST_DRAWS):
        load = draw()
        if load <= MOST_LOAD_CORES:
            break
    return round(load, 2)


def train(case: str, folder: Path) -> dict[str, Any]:
    """One run of the product, and its steps by its journals."""
    shutil.rmtree(folder, ignore_errors=True)
    stamp = LoadStamp()
    command = [sys.executable, "-m", "equipoise.cli.main", "train", "--out", str(folder)]
    subprocess.run(
        [*command, "--quiet", *flags(COMMON | CASES[case])], check=True, stdout=sys.stderr
    )
    ended = {"other_load_cores": round(stamp.other_load(), 2), **read_steps(folder)}
    shutil.rmtree(folder)
    return ended


def read_steps(folder: Path) -> dict[str, Any]:
    """Seconds of each step but the first: in all, by phase, and on the processor."""
    ranks = [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted((folder / "journal").glob("rank-*.jsonl"))
    ]
    steps: dict[str, list[float]] = {}
    for step in range(2, STEPS + 1):
        scalars = [
            next(e for e in events if e["name"] == "step" and e.get("step") == step)
            for events in ranks
        ]
        row = {
            "step": float(np.mean([each["step_s"] for each in scalars])),
            "processor": max(each["busy_s"] for each in scalars),
        }
        for name in ("forward", "backward", "reduce", "optimizer", "wait"):
            spent = [
                sum(
                    e["duration_s"]
                    for e in events
                    if e["kind"] == "span" and e["name"].startswith(name) and e["step"] == step
                )
                for events in ranks
            ]
            row[name] = max(spent)
        for name, seconds in row.items():
            steps.setdefault(name, []).append(seconds)
    start = next(e for e in ranks[0] if e["name"] == "start")
    packs = {e["step"]: e["digest"] for e in ranks[0] if e["name"] == "pack"}
    return {"steps": steps, "curve": start["curve"], "packs": packs}


def row_of(case: str, runs: list[dict[str, Any]], machines: list[Machine]) -> dict[str, Any]:
    """A plan: predicted beside measured."""
    predicted: list[float] = []
    terms: dict[str, list[float]] = {}
    for run, machine in zip(runs, machines, strict=True):
        for priced in foresee(case, run, machine):
            predicted.append(priced.price.step_s)
            for name, seconds in priced.price.terms.items():
                terms.setdefault(name, []).append(seconds)
    steps = {name: [s for run in runs for s in run["steps"][name]] for name in runs[0]["steps"]}
    measured, guess = float(np.median(steps["step"])), float(np.median(predicted))
    by_pass = [float(np.median(run["steps"]["step"])) for run in runs]
    return {
        "plan": case,
        "predicted_s": guess,
        "measured_s": measured,
        "error": guess / measured - 1,
        "predicted, medians of passes": np.median(
            np.array(predicted).reshape(len(runs), -1), axis=1
        ).tolist(),
        "measured, medians of passes": by_pass,
        "measured": spread(steps["step"]),
        "step by step, mean absolute error": float(
            np.mean(np.abs(np.array(predicted) / np.array(steps["step"]) - 1))
        ),
        "predicted terms": {name: float(np.median(each)) for name, each in terms.items()},
        "measured phases": {
            name: float(np.median(each)) for name, each in steps.items() if name != "step"
        },
        "other_load_cores": [run["other_load_cores"] for run in runs],
    }


def answer(state: dict[str, Any]) -> dict[str, Any]:
    """All plans, their errors and their order."""
    rows, machines = [], []
    for group, (_, cases) in enumerate(GROUPS):
        drawn = [at for at, timed in enumerate(state["passes"]) if str(group) in timed]
        here = [calibrated_machine(at, group) for at in drawn]
        runs_of = [state["passes"][at][str(group)]["runs"] for at in drawn]
        rows += [row_of(case, [runs[case] for runs in runs_of], here) for case in cases if runs_of]
        machines += here
    errors = np.array([row["error"] for row in rows])
    predicted, measured = ([row[name] for row in rows] for name in ("predicted_s", "measured_s"))
    apart = [
        (i, j)
        for i in range(len(rows))
        for j in range(i)
        if min(len(rows[at]["measured, medians of passes"]) for at in (i, j)) > 1
        and abs(measured[i] / measured[j] - 1) > _noise(rows[i], rows[j])
    ]
    agree = [
        float(np.sign((predicted[i] - predicted[j]) * (measured[i] - measured[j])))
        for i, j in apart
    ]
    return {
        "what": "seconds of a step on two pinned ranks, predicted after calibrate and measured",
        "goal": GOAL,
        "plans": len(rows),
        "passes": sum(bool(groups) for groups in state["passes"]),
        "groups of plans that are left": _left(state),
        "within the goal": int((np.abs(errors) <= GOAL["error"]).sum()),
        "mape": float(np.abs(errors).mean()),
        "mean error": float(errors.mean()),
        "worst": float(np.abs(errors).max()),
        "tau": kendall_tau(measured, predicted),
        "tau, of plans further apart than their passes": float(np.mean(agree)) if agree else None,
        "pairs further apart than their passes": len(apart),
        "curves read beyond their sizes": sorted(
            set().union(*(machine.extrapolated for machine in machines))
        ),
        "rows": rows,
        "calibrate": state["calibrate"],
        "other load while ways were timed": [
            timed["other load while ways were timed"]
            for groups in state["passes"]
            for timed in groups.values()
        ],
        "scheduler": state["scheduler"],
        "environment": environment(),
    }


def _noise(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Spread of the medians of passes, for the worse of two plans."""
    return max(
        max(each["measured, medians of passes"]) / min(each["measured, medians of passes"]) - 1
        for each in (one, other)
    )


def work(seconds: float, *, now: bool) -> dict[str, Any] | None:
    """Go on for ``seconds``; returns the state if it is complete or need not be."""
    begin = time.perf_counter()
    FOLDER.mkdir(exist_ok=True)
    kept = FOLDER / "state.json"
    state: dict[str, Any] = {"passes": [{} for _ in range(PASSES)]}
    if kept.exists():
        state = read_state(kept)
    else:
        open_corpus()
        state["calibrate"] = calibrate()
        policy = os.sched_getscheduler(0)
        state["scheduler"] = {os.SCHED_OTHER: "other", os.SCHED_FIFO: "fifo"}.get(policy, "")
    for number, group in itertools.product(range(PASSES), range(len(GROUPS))):
        if str(group) in state["passes"][number]:
            continue
        if time.perf_counter() - begin > seconds:
            sys.stderr.write(f"{_left(state)} groups of plans are left.\n")
            return read_state(kept) if now else None
        state["passes"][number][str(group)] = draw_group(number, group)
        kept.write_text(json.dumps(state))
    return read_state(kept)


def _left(state: dict[str, Any]) -> int:
    return PASSES * len(GROUPS) - sum(len(groups) for groups in state["passes"])


def read_state(kept: Path) -> dict[str, Any]:
    """All pieces; read back from JSON, so keys are strings."""
    return dict(json.loads(kept.read_text()))


def main() -> None:
    """Go on, and print the answer once nothing is left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--now", action="store_true")
    args = parser.parse_args()
    os.environ.update(whole_environment())
    if args.fresh:
        shutil.rmtree(FOLDER, ignore_errors=True)
    state = work(args.seconds, now=args.now)
    if state is not None:
        json.dump(answer(state), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
