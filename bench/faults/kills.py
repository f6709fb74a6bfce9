"""Is each rank that is killed named, and how soon does the run go on, and with the same weights?

One run trains beside its undisturbed twin. Again and again one of its ranks is ended by SIGKILL, at
a random moment since the last start: while ranks meet, load, compute, exchange or save. Timed are
the line that names the rank, and the end of the first step after it.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.lib.corpus import open_corpus
from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.fault.drill.attempt import Attempt
from equipoise.fault.drill.facts import events, ledger, processes, state

_RANKS, _STEPS_PER_KILL, _EVERY = 2, 6, 4
_WITHIN_S = 2.0
"""A kill comes within this of the first sign of its start, most of it in steps."""

_LOOK_S = 0.005


@dataclass(frozen=True, slots=True)
class Kill:
    """A rank that got SIGKILL."""

    rank: int
    process: int
    at_s: float
    """By the clock that never goes back [s]."""
    t: float
    """By the clock on the wall [s]."""


def _words(steps: int) -> tuple[str, ...]:
    keys = {
        "model.preset": "2m",
        "model.layers": 1,
        "layout.dp": _RANKS,
        "pack.context_tokens": 1024,
        "pack.step_tokens": 2048,
        "train.steps": steps,
        "checkpoint.every_steps": _EVERY,
        "fault.restarts": 10_000,
        "fault.within_s": 1e6,
    }
    return tuple(f"--{key}={value}" for key, value in keys.items())


def _strike(attempt: Attempt, folder: Path, kills: int) -> list[Kill]:
    """Kill ranks until that many are, or the run ends."""
    draw, made = random.Random(0), list[Kill]()
    while len(made) < kills and attempt.process.poll() is None:
        begun = len(events(folder, "start"))
        attempt.wait_until(lambda: len(processes(folder)) == _RANKS)
        rank, due = draw.randrange(_RANKS), time.monotonic() + draw.uniform(0, _WITHIN_S)
        while time.monotonic() < due:
            time.sleep(_LOOK_S)
        process = processes(folder).get(rank)
        if process is None:
            continue
        made.append(Kill(rank, process, time.monotonic(), time.time()))
        os.kill(process, signal.SIGKILL)
        attempt.wait_until(lambda: len(_named(attempt)) == len(made))
        attempt.wait_until(lambda begun=begun: len(events(folder, "start")) > begun)
    return made


def _named(attempt: Attempt) -> list[tuple[int, int, float]]:
    """Rank and process of each line that names one, and when it came."""
    lines = [
        (re.match(r"Rank (\d+) of \d+ \(pid (\d+)\) was ended by SIGKILL", each.text), each.at_s)
        for each in attempt.errors
    ]
    return [(int(match[1]), int(match[2]), at_s) for match, at_s in lines if match]


def measure(kills: int) -> dict[str, object]:
    """Kill ranks of one run."""
    open_corpus()
    stamp, steps = LoadStamp(), _STEPS_PER_KILL * kills
    with tempfile.TemporaryDirectory() as name:
        straight, folder = Path(name) / "straight", Path(name) / "run"
        with Attempt((*_words(steps), "--out", str(straight))) as attempt:
            if attempt.end():
                sys.exit(attempt.last_words)
        shutil.copytree(straight / "curves", folder / "curves")
        with Attempt((*_words(steps), "--out", str(folder))) as attempt:
            made = _strike(attempt, folder, kills)
            code = attempt.end()
        named, said = _named(attempt), attempt.last_words
        ends = [each["t"] for each in events(folder, "step")]
        is_equal = bool(state(folder, steps)) and (
            (state(folder, steps), ledger(folder)) == (state(straight, steps), ledger(straight))
        )
    after_s = [at_s - kill.at_s for kill, (_, _, at_s) in zip(made, named, strict=False)]
    resumed_s = [min(t for t in ends if t > kill.t) - kill.t for kill in made if ends[-1] > kill.t]
    return {
        "what": "ranks of one run of two that get SIGKILL at random moments (measured)",
        "kills": len(made),
        "named rightly": sum(
            (kill.rank, kill.process) == (rank, process)
            for kill, (rank, process, _) in zip(made, named, strict=False)
        ),
        "named_s (goal 0.1)": spread(after_s),
        "first step done_s (goal 8)": spread(resumed_s),
        "exit code": code,
        "weights, moments and documents equal": is_equal,
        **({} if is_equal else {"said": said}),
        "other_load_cores": stamp.other_load(),
        "environment": environment(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    json.dump(measure(parser.parse_args().kills), sys.stdout, indent=1)
