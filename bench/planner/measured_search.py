"""The measured search beside an exhaustive one: how much it loses in a quarter of the trials.

``--measure SECONDS`` trains choices of ``measured/measured_search.toml`` on this machine, as the
search does, least measured first, and appends each reading to ``measured/measured_search.csv``; a
reading is dropped if other processes used more than 0.35 cores meanwhile. The table was taken
in parts of at most four minutes, with ``nice -n -20``.

Without it, searches are replayed against that table: each seed adds noise to each choice,
as much as readings of one choice vary in the table and at least 2%, and is judged by the table's
seconds. Beside it: random search, and the simulator's prices alone, as recorded with the readings.
"""

import argparse
import csv
import itertools
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.stamp import LoadStamp, environment
from equipoise.base.arrays import Floats, Ints
from equipoise.plan.measured.next import MeasuredSpace, Trial, next_choice

TABLE = Path(__file__).parents[1] / "measured" / "measured_search.csv"
RUN = TABLE.with_suffix(".toml")
HEAD = (
    "part",
    "choice",
    "keys",
    "settings",
    "predicted_s",
    "step_s",
    "cause",
    "wall_s",
    "other_load",
)
SEEDS = 100
GOAL = {"regret": 0.03, "share of the trials": 0.25}
LIMIT_S, MOST_LOAD = 120.0, 0.35
LEAST_NOISE = 0.02


def measure(seconds: float) -> None:
    """Take readings until time is up; no trial begins that would not end by then."""
    from equipoise.launch.trial import run_trial
    from equipoise.plan.measured.request import read_measured
    from equipoise.plan.request import RunPlanRequest

    begin = time.monotonic()
    asked = read_measured(RunPlanRequest.read(RUN, ranks=2))
    if not TABLE.exists():
        origin = json.dumps(environment() | {"niceness": os.nice(0)})
        TABLE.write_text(
            f"# bench/planner/measured_search.py --measure; {origin}\n{','.join(HEAD)}\n"
        )
    count = np.zeros(len(asked.choices.keys), dtype=np.int64)
    part = 0
    for row in _read_rows():
        count[int(row["choice"])] += 1
        part = max(part, int(row["part"]) + 1)
    order = np.random.default_rng(0).permutation(len(count))
    longest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() - begin + longest < seconds:
            choice = int(order[np.argmin(count[order])])
            stamp = LoadStamp()
            words = asked.trial_words(choice, limit_s=LIMIT_S)
            end = run_trial(words, Path(folder) / "trial", limit_s=LIMIT_S)
            load = stamp.other_load()
            longest = max(longest, end.wall_s + 2)
            keys = " ".join(f"{name}={value}" for name, value in asked.choices.keys[choice].items())
            sys.stderr.write(f"{keys}: {end.step_s} {end.cause} load {load:.2f}\n")
            if load > MOST_LOAD:
                continue
            count[choice] += 1
            codes = " ".join(map(str, asked.choices.settings[choice].tolist()))
            price = f"{asked.space.prior_s[choice]:.6g}"
            step = "" if end.step_s is None else f"{end.step_s:.6g}"
            with TABLE.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(
                    (
                        part,
                        choice,
                        keys,
                        codes,
                        price,
                        step,
                        end.cause,
                        f"{end.wall_s:.1f}",
                        f"{load:.2f}",
                    )
                )


def _read_rows() -> list[dict[str, str]]:
    lines = TABLE.read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Every choice, measured."""

    keys: list[str]
    settings: Ints
    prior_s: Floats
    step_s: Floats
    """NaN where every trial failed."""
    parts: Floats
    """How much slower the machine was in each part, as a factor whose mean logarithm is 0."""
    spread: float
    """Standard deviation of the logarithm of a reading, beside choice and part."""
    repeats: int
    """Readings beyond those that choices and parts explain; if 0, the spread says nothing."""
    readings: list[list[float]]

    @property
    def noise(self) -> float:
        """Noise of a replayed reading: the spread, if enough choices were read twice."""
        return max(self.spread, LEAST_NOISE) if self.repeats >= 6 else LEAST_NOISE


def read_table() -> Table:
    """The exhaustively measured table: each reading is a choice's seconds times a part's factor.

    A machine that others share is not as fast at one time as at another. Choices that were read in
    several parts show by how much; the rest are compared within their part.
    """
    rows = _read_rows()
    firsts = list({int(row["choice"]): row for row in rows[::-1]}.items())
    firsts.sort()
    read = [row for row in rows if row["step_s"]]
    logs = np.log([float(row["step_s"]) for row in read])
    listed = [at for at, _ in firsts]
    choice = np.array([listed.index(int(row["choice"])) for row in read])
    part = np.array([int(row["part"]) for row in read])
    left, right = np.eye(len(firsts))[choice], np.eye(part.max() + 1)[part]
    design = np.hstack([left, right])
    solution, _, rank, _ = np.linalg.lstsq(design, logs, rcond=None)
    rest = logs - design @ solution
    factors = solution[len(firsts) :]
    seconds = np.exp(solution[: len(firsts)] + factors.mean())
    seconds[~left.any(0)] = np.nan
    return Table(
        [row["keys"] for _, row in firsts],
        np.array([[int(code) for code in row["settings"].split()] for _, row in firsts]),
        np.array([float(row["predicted_s"]) for _, row in firsts]),
        seconds,
        np.exp(factors - factors.mean()),
        float(np.sqrt((rest**2).sum() / max(1, len(logs) - rank))),
        len(logs) - int(rank),
        [[float(s) for s in np.exp(logs[choice == at])] for at in range(len(firsts))],
    )


def search(table: Table, space: MeasuredSpace, seed: int) -> list[int]:
    """The choices that a search tries, best reading first."""
    off = np.random.default_rng(seed).normal(0.0, table.noise, len(table.step_s))
    read = table.step_s * np.exp(off)
    trials: list[Trial] = []
    while len(trials) < space.budget:
        choice = next_choice(space, trials, seed=seed)
        if choice is None:
            break
        failed = bool(np.isnan(read[choice]))
        trials.append(Trial(choice, None if failed else float(read[choice]), "failed" * failed))
    return [trial.choice for trial in trials if trial.step_s == _fastest(trials)][:1]


def _fastest(trials: list[Trial]) -> float:
    return min(float(trial.step_s) for trial in trials if trial.step_s is not None)


def judge(regrets: list[float]) -> dict[str, float]:
    """Regrets of some searches."""
    return {
        "within 3% of the best": float(np.mean(np.array(regrets) <= GOAL["regret"])),
        "median regret": float(np.median(regrets)),
        "largest regret": max(regrets),
        "searches": len(regrets),
    }


def replay() -> dict[str, Any]:
    """Searches, random searches and prices alone, against the table."""
    table = read_table()
    truth = table.step_s
    best = float(np.nanmin(truth))
    regret = truth / best - 1
    space = MeasuredSpace(table.settings, table.prior_s)
    blind = MeasuredSpace(table.settings, np.full(len(truth), np.nan))
    budget = space.budget
    random = [
        float(np.nanmin(regret[np.random.default_rng(seed).permutation(len(truth))[:budget]]))
        for seed in range(SEEDS)
    ]
    by_price = np.argsort(table.prior_s, kind="stable")
    ratio = np.log(table.prior_s / truth)
    pairs = itertools.combinations(np.flatnonzero(~np.isnan(truth)).tolist(), 2)
    signs = [
        np.sign((truth[a] - truth[b]) * (table.prior_s[a] - table.prior_s[b])) for a, b in pairs
    ]
    return {
        "what": "step seconds of real runs on two ranks, measured; searches replayed on them",
        "goal": GOAL,
        "choices": len(truth),
        "trials of a search": budget,
        "readings": sum(map(len, table.readings)),
        "failed choices": int(np.isnan(truth).sum()),
        "best": table.keys[int(np.nanargmin(truth))],
        "best_s": best,
        "slowest over best": float(np.nanmax(truth)) / best,
        "choices within 3% of the best": int((regret <= GOAL["regret"]).sum()),
        "choices that were read more than once": sum(len(each) > 1 for each in table.readings),
        "noise of a replayed reading (standard deviation of the logarithm)": table.noise,
        "the machine's speed in each part": table.parts.tolist(),
        "search": judge([float(regret[search(table, space, s)[0]]) for s in range(SEEDS)]),
        "search without prices": judge(
            [float(regret[search(table, blind, s)[0]]) for s in range(SEEDS)]
        ),
        "random search": judge(random),
        "prices alone": {
            "regret of the cheapest": float(regret[by_price[0]]),
            "regret of the best of as many trials": float(np.nanmin(regret[by_price[:budget]])),
            "Kendall tau": float(np.mean(signs)),
            "standard deviation of log(price / measured)": float(np.nanstd(ratio)),
        },
        "table": [
            {"keys": keys, "predicted_s": price, "measured_s": readings}
            for keys, price, readings in zip(
                table.keys, table.prior_s.tolist(), table.readings, strict=True
            )
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=float, metavar="SECONDS", help="take readings meanwhile")
    args = parser.parse_args()
    if args.measure is None:
        json.dump(replay(), sys.stdout, indent=1)
    else:
        measure(args.measure)


if __name__ == "__main__":
    main()
