"""Record what neighbours do to training steps: ``python -m bench.interference.record FILE.npz``.

For every workload and kind, at two levels, a disturbed stretch follows a calm one. Whatever else
the machine does while this runs is in the metrics and in the step times alike.
"""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.interference.stress import KINDS
from bench.interference.work import WORKLOADS

CALM_S, DISTURBED_S = 2.0, 5.0
LEVELS = (1, 2, 4)
_SETTLE_S = 8.0


def _stress(kind: str, folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    KINDS[kind][1](folder)


def record(workload: str, folder: Path, schedule: list[tuple[str, int]]) -> dict[str, np.ndarray]:
    """Rows of one workload: metrics, performance, and what ran beside it."""
    ranks = 2 if workload == "ranks" else 1
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.interference.work", workload]
    workers = [
        subprocess.Popen([*command, str(rank), str(folder)], env=environment)
        for rank in range(ranks)
    ]
    time.sleep(_SETTLE_S)
    fork = multiprocessing.get_context("fork")
    spans: list[tuple[float, float, str, int]] = []
    try:
        for kind, level in schedule:
            began = time.time()
            time.sleep(CALM_S)
            spans.append((began, time.time(), "", 0))
            neighbours = [
                fork.Process(target=_stress, args=(kind, folder), daemon=True) for _ in range(level)
            ]
            began = time.time()
            for each in neighbours:
                each.start()
            time.sleep(DISTURBED_S)
            spans.append((began, time.time(), kind, level))
            for each in neighbours:
                each.kill()
            for each in neighbours:
                each.join()
    finally:
        (folder / "stop").touch()
        for each in workers:
            each.wait()
    return label(json.loads((folder / "made.json").read_text()), spans)


def label(
    made: dict[str, list], spans: list[tuple[float, float, str, int]]
) -> dict[str, np.ndarray]:
    """Performance of each second, 1 where nothing slowed a step, and what ran beside it."""
    ends = np.array(made["ends"])
    begins, rows = np.concatenate((ends[:1], ends[:-1])), np.array(made["rows"])
    stops = rows[:, 0]
    done = np.array([_steps(begins, ends, stop - 1.0, stop) for stop in stops])
    performance = done / np.quantile(done, 0.98)
    kinds, levels, since = [], [], []
    for stop in stops.tolist():
        span = next((each for each in spans if each[0] <= stop - 0.5 < each[1]), None)
        kinds.append("" if span is None else span[2])
        levels.append(-1 if span is None else span[3])
        since.append(0.0 if span is None else stop - span[0])
    return {
        "rows": rows[:, 1:].astype(np.float32),
        "performance": np.minimum(performance, 1.0).astype(np.float32),
        "kind": np.array(kinds, dtype="U8"),
        "level": np.array(levels, dtype=np.int8),
        "since_s": np.array(since, dtype=np.float32),
    }


def _steps(begins: np.ndarray, ends: np.ndarray, start: float, stop: float) -> float:
    """Steps within a second; one that began before it or ends after it counts in part."""
    inside = np.clip(np.minimum(ends, stop) - np.maximum(begins, start), 0, None)
    return float((inside / np.maximum(ends - begins, 1e-6)).sum())


def main() -> None:
    """Record all workloads and write one file."""
    target, draw = Path(sys.argv[1]), random.Random(17)
    workloads = sys.argv[2].split(",") if len(sys.argv) > 2 else list(WORKLOADS)
    kinds = sys.argv[3].split(",") if len(sys.argv) > 3 else list(KINDS)
    parts = []
    for workload in workloads:
        schedule = [(kind, level) for kind in kinds for level in sorted(draw.sample(LEVELS, 2))]
        draw.shuffle(schedule)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            part = record(workload, Path(folder), schedule)
        part["workload"] = np.full(len(part["rows"]), workload, dtype="U8")
        parts.append(part)
        joined = {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}
        np.savez_compressed(target, **joined)
        sys.stderr.write(f"{workload}: {len(part['rows'])} rows\n")


if __name__ == "__main__":
    main()
