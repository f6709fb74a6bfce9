"""Real steps on two ranks beside what was foreseen of them after ``equipoise calibrate``.

A session calibrates the machine with the parts of one decoder's steps, then trains eighteen plans
of that decoder (layouts, ZeRO stages, schedules, strategies, packings, recomputation, windows,
depths) by ``equipoise train``, pinned, in turn. Each step is foreseen from its own packs, by its
own session's calibration: what neighbours take of caches and clocks changes within an hour by more
than the goal. A plan's figure is the median of all its steps but each run's first. Nothing is
fitted to a scored run. Beside the clock's seconds stand the processor's, which strangers lengthen
less.

It works in pieces, kept in a folder until all are there::

    python -m bench.plans_real --seconds 180        # go on for so long, say what is left
    python -m bench.plans_real --seconds 0 --now    # the answer from the pieces that are there
    python -m bench.plans_real --fresh              # forget all pieces
    python -m bench.run plans_real                  # whatever is left, and the answer
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.corpus import open_corpus
from bench.plans_real_cases import CALIBRATED, CASES, COMMON, STEPS, flags
from bench.ranking import kendall_tau
from bench.stamp import LoadStamp, environment, spread
from equipoise.balance.pack import make_packer
from equipoise.cli.calibrate import parts_plan_for
from equipoise.cost.curve import LoadCurve
from equipoise.cost.step import StepOptions, residuals_of
from equipoise.data.progress import SilentProgress
from equipoise.data.stream import DocumentStream
from equipoise.sim.machine import Machine
from equipoise.sim.step import StepRun, run_step
from equipoise.spec.cluster import cores_cluster
from equipoise.spec.device_file import read_device_file, write_device_file
from equipoise.spec.device_here import this_cpu
from equipoise.spec.layout import Layout
from equipoise.spec.load import read_run
from equipoise.spec.pack import PackedStep
from equipoise.spec.resolve import ResolvedRun
from equipoise.train.calibrate_model import measure_parts

GOAL = {"error": 0.08, "tau": 0.9, "plans": 12}
SESSIONS = 2
FOLDER = Path(tempfile.gettempdir()) / f"equipoise-plans-real-{os.getuid()}"


def calibrate(session: int) -> dict[str, Any]:
    """Measure the machine, with the parts of the decoder's steps; in later sessions those alone."""
    begin, file = time.perf_counter(), device_file(session)
    if session == 0:
        command = [sys.executable, "-m", "equipoise.cli.main", "calibrate", "--out", str(file)]
        subprocess.run([*command, "--quiet", *flags(CALIBRATED)], check=True, stdout=sys.stderr)
    else:
        first = device_file(0)
        link = Machine(cores_cluster(this_cpu(first), 2)).context_links(Layout(cp=2)).near
        plan = parts_plan_for(read_run(None, list(CALIBRATED.items())))
        parts = measure_parts(plan, link, SilentProgress())
        write_device_file(file, dataclasses.replace(read_device_file(first), parts=(parts,)))
    return {"seconds": round(time.perf_counter() - begin, 1)}


def device_file(session: int) -> Path:
    """What a session's calibration wrote."""
    return FOLDER / f"this-cpu-{session}.json"


def train(case: str, folder: Path) -> dict[str, Any]:
    """One run of the product, and what its journals say of its steps."""
    shutil.rmtree(folder, ignore_errors=True)
    stamp = LoadStamp()
    command = [sys.executable, "-m", "equipoise.cli.main", "train", "--out", str(folder)]
    subprocess.run(
        [*command, "--quiet", *flags(COMMON | CASES[case])], check=True, stdout=sys.stderr
    )
    found = {"other_load_cores": round(stamp.other_load(), 2), **read_steps(folder)}
    shutil.rmtree(folder)
    return found


def read_steps(folder: Path) -> dict[str, Any]:
    """Seconds of each step but the first: whole, by phase, and of the processor."""
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


def packs_of(resolved: ResolvedRun, curve: LoadCurve) -> Iterator[PackedStep]:
    """Every step's packs, as the run makes them."""
    spec, store = resolved.spec, open_corpus()
    stream = DocumentStream(
        store.doc_tokens, seed=spec.train.seed, context_tokens=spec.pack.context_tokens
    )
    packer = make_packer(spec.pack, 2 // spec.layout.sharing, curve)
    for step in range(STEPS):
        yield packer.step(stream.step(step * spec.pack.step_tokens, spec.pack.step_tokens))


def foresee(case: str, run: dict[str, Any], machine: Machine) -> list[StepRun]:
    """Each step but the first, priced from its packs.

    Raises:
        ValueError: the packs are not those that ran.
    """
    resolved = read_run(None, list((COMMON | CASES[case]).items()))
    spec = resolved.spec
    known = {**run["curve"]}
    known |= {name: tuple(known[name]) for name in ("doc_tokens", "doc_ns")}
    options = StepOptions(
        spec.pack.context_tokens,
        spec.pack.step_tokens // spec.pack.context_tokens,
        virtual=max(1, spec.layout.stages // spec.layout.pipeline),
        schedule=spec.layout.schedule,
        recompute=spec.train.recompute,
        precision=spec.train.precision,
        policy=spec.pack.policy,
        sharding=spec.layout.sharding,
        context_strategy=spec.layout.strategy,
        residuals=residuals_of(machine.device),
    )
    priced = []
    for step, packed in enumerate(packs_of(resolved, LoadCurve(**known)), start=1):
        if packed.digest != run["packs"][str(step)]:
            raise ValueError(f"{case}: step {step} was packed otherwise than it is foreseen.")
        documents = [[batch.doc_tokens.tolist() for batch in rank] for rank in packed.ranks]
        layout = spec.layout.of_ranks(2)
        if step > 1:
            priced.append(run_step(resolved.model, machine, layout, options, documents=documents))
    return priced


def row_of(case: str, runs: list[dict[str, Any]], machines: list[Machine]) -> dict[str, Any]:
    """A plan: predicted beside measured."""
    predicted: list[float] = []
    terms: dict[str, list[float]] = {}
    for run, machine in zip(runs, machines, strict=False):
        for found in foresee(case, run, machine):
            predicted.append(found.price.step_s)
            for name, seconds in found.price.terms.items():
                terms.setdefault(name, []).append(seconds)
    steps = {name: [s for run in runs for s in run["steps"][name]] for name in runs[0]["steps"]}
    measured, guess = float(np.median(steps["step"])), float(np.median(predicted))
    by_session = [float(np.median(run["steps"]["step"])) for run in runs]
    return {
        "plan": case,
        "predicted_s": guess,
        "measured_s": measured,
        "error": guess / measured - 1,
        "measured, medians of sessions": by_session,
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
    machines = [
        Machine(cores_cluster(this_cpu(device_file(session)), 2))
        for session in range(len(state["calibrate"]))
    ]
    rows = [row_of(case, runs, machines) for case, runs in state["runs"].items() if runs]
    errors = np.array([row["error"] for row in rows])
    predicted, measured = ([row[name] for row in rows] for name in ("predicted_s", "measured_s"))
    apart = [
        (i, j)
        for i in range(len(rows))
        for j in range(i)
        if len(machines) > 1 and abs(measured[i] / measured[j] - 1) > _noise(rows[i], rows[j])
    ]
    agree = [
        float(np.sign((predicted[i] - predicted[j]) * (measured[i] - measured[j])))
        for i, j in apart
    ]
    return {
        "what": "seconds of a step on two pinned ranks, predicted after calibrate and measured",
        "goal": GOAL,
        "plans": len(rows),
        "runs that are left": sum(SESSIONS - len(runs) for runs in state["runs"].values()),
        "within the goal": int((np.abs(errors) <= GOAL["error"]).sum()),
        "mape": float(np.abs(errors).mean()),
        "mean error": float(errors.mean()),
        "worst": float(np.abs(errors).max()),
        "tau": kendall_tau(measured, predicted),
        "tau, of plans further apart than their sessions": float(np.mean(agree)) if agree else None,
        "pairs further apart than their sessions": len(apart),
        "curves read beyond their sizes": sorted(
            set().union(*(machine.extrapolated for machine in machines))
        ),
        "rows": rows,
        "calibrate": state["calibrate"],
        "scheduler": state["scheduler"],
        "environment": environment(),
    }


def _noise(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far medians of sessions lie apart, of the worse of two plans."""
    return max(
        max(each["measured, medians of sessions"]) / min(each["measured, medians of sessions"]) - 1
        for each in (one, other)
    )


def work(seconds: float, *, now: bool) -> dict[str, Any] | None:
    """Go on for so long; the state if all is there, or what is there is enough."""
    begin = time.perf_counter()
    FOLDER.mkdir(exist_ok=True)
    kept = FOLDER / "state.json"
    state: dict[str, Any] = {"calibrate": [], "runs": {case: [] for case in CASES}}
    if kept.exists():
        state = json.loads(kept.read_text())
    open_corpus()
    for session in range(SESSIONS):
        if len(state["calibrate"]) == session:
            state["calibrate"].append(calibrate(session))
            policy = os.sched_getscheduler(0)
            state["scheduler"] = {os.SCHED_OTHER: "other", os.SCHED_FIFO: "fifo"}.get(policy, "")
            kept.write_text(json.dumps(state))
        for case in CASES:
            if len(state["runs"].setdefault(case, [])) > session:
                continue
            if time.perf_counter() - begin > seconds:
                left = sum(SESSIONS - len(runs) for runs in state["runs"].values())
                sys.stderr.write(f"{left} runs are left.\n")
                return state if now else None
            state["runs"][case].append(train(case, FOLDER / "run"))
            kept.write_text(json.dumps(state))
    # As it is read back, keys of objects are words.
    return dict(json.loads(kept.read_text()))


def main() -> None:
    """Go on, and answer where nothing is left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--now", action="store_true")
    args = parser.parse_args()
    if args.fresh:
        shutil.rmtree(FOLDER, ignore_errors=True)
    state = work(args.seconds, now=args.now)
    if state is not None:
        json.dump(answer(state), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
