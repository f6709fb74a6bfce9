"""How well slow ranks are named in the noise of runs that the thresholds were not chosen on.

``python -m bench.faults.slow_ranks RUN...`` takes folders of runs of even ranks, and without any
trains one. Each run's own steps are replayed as they came, which counts false alarms, and then
again with one rank made slower by a fifth in one part from a step on.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from bench.lib.corpus import open_corpus
from bench.lib.stamp import LoadStamp, environment
from equipoise.fault.detect.slow import PARTS, SlowRanks, StepTimes
from equipoise.observe.journal_lines import read_journals

_BEFORE, _WITHIN, _EVERY, _BY = 40, 20, 20, 0.2


def steps_of(folder: Path) -> list[StepTimes]:
    """What the ranks of a run spent on each step, as its journals have it."""
    ranks = [each.steps for _, each in sorted(read_journals(folder).items())]
    numbers = sorted(set(ranks[0]).intersection(*ranks[1:]))
    made = []
    for number in numbers:
        rows = [each[number] for each in ranks]
        own = {
            key: np.array([float(row["own"][key]) for row in rows])
            for key in ("data_s", "compute_s", "communication_s", "core_s")
        }
        made.append(StepTimes(np.array([float(row["predicted_s"]) for row in rows]), **own))
    return made


def alarms(steps: list[StepTimes]) -> int:
    """How often a rank of even ones is accused."""
    watch = SlowRanks(len(steps[0].predicted_s))
    verdicts = [each for at, times in enumerate(steps, 1) for each in watch.learn(at, times)]
    return sum(not each.is_over for each in verdicts)


def is_named(steps: list[StepTimes], rank: int, part: str) -> bool:
    """Whether a rank that is slower after ``_BEFORE`` steps is the first one named, with its part.

    A rank that the run's own noise accuses before that counts as a miss.
    """
    watch = SlowRanks(len(steps[0].predicted_s))
    for at, times in enumerate(steps, 1):
        if at > _BEFORE:
            work_s = times.data_s + times.compute_s + times.communication_s
            more = _BY * work_s * (np.arange(len(work_s)) == rank)
            is_part = {each: more if each == part else 0.0 for each in PARTS}
            times = StepTimes(
                times.predicted_s,
                times.data_s + is_part["data"],
                times.compute_s + is_part["compute"],
                times.communication_s + is_part["communication"],
                times.core_s + is_part["compute"],
            )
        for each in watch.learn(at, times):
            return (each.rank, each.part) == (rank, part) and at > _BEFORE
    return False


def train(folder: Path, steps: int) -> None:
    """Train two even ranks for as many short steps."""
    open_corpus()
    sizes = {"model.preset": "2m", "model.layers": 1, "layout.dp": 2, "train.steps": steps}
    sizes |= {"pack.context_tokens": 1024, "pack.step_tokens": 2048}
    words = [f"--{key}={value}" for key, value in sizes.items()]
    command = [sys.executable, "-m", "equipoise.cli.main", "train", "--out", str(folder), "--quiet"]
    subprocess.run([*command, *words], check=True, stdout=sys.stderr)


def main() -> None:
    """Print false alarms, and how often a slow rank is named in time, by part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs of even ranks")
    parser.add_argument("--steps", type=int, default=2000, help="of the run that is trained")
    args = parser.parse_args()
    stamp = LoadStamp()
    with tempfile.TemporaryDirectory() as name:
        if not args.runs:
            trained = Path(name) / "run"
            train(trained, args.steps)
        runs = [steps_of(folder) for folder in args.runs or [trained]]
    named: dict[str, list[bool]] = {part: [] for part in PARTS}
    for steps in runs:
        for begin in range(0, len(steps) - _BEFORE - _WITHIN + 1, _EVERY):
            stretch = steps[begin : begin + _BEFORE + _WITHIN]
            for rank in range(len(steps[0].predicted_s)):
                for part in PARTS:
                    named[part].append(is_named(stretch, rank, part))
    answer = {
        "steps": sum(map(len, runs)),
        "false alarms": sum(map(alarms, runs)),
        "trials": {part: len(each) for part, each in named.items()},
        "named": {part: float(np.mean(each)) if each else None for part, each in named.items()},
        "other_load_cores": stamp.other_load(),
        "environment": environment(),
    }
    json.dump(answer, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
