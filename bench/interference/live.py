"""Is it seen live whether a slow rank or its neighbour on the host is to blame?

Two ranks, each bound to a core of its own, compute the same work again and again. After calm
seconds rank 1 is slowed in one way after another: a program burns its core, it sleeps in each
round, it computes more than its share, or a thread of its own computes beside it. Each rank's own
rounds and rows are judged as an alarm judges them; rank 0 stays as it was.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from bench.lib.stamp import environment
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.fault.interference.sampler import HostSampler
from equipoise.fault.interference.verdict import HostVerdict, verdict

_CALM_S, _SLOW_S = 5.5, 4.5
_SIZE, _PRODUCTS = 256, 40
_WAYS = {
    "a program burns its core": "its neighbour on the host",
    "it sleeps in each round": "this rank",
    "it computes twice as much": "this rank",
    "a thread of its own burns its core": "this rank",
}
"""How rank 1 is slowed, and whose fault that is."""


def slowed(ranks: Ranks, way: str) -> tuple[str, float, float, str]:
    """One trial on one rank: whose fault it was said to be, the slowdown, the share, the words."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[ranks.rank]})
    torch.set_num_threads(1)
    with HostSampler() as sampler:
        usual_s = _rounds(_CALM_S)
        usual = [row for _, row in sampler.take()]
        ranks.barrier()
        is_struck = ranks.rank == 1
        ended = threading.Event()
        burner = None
        if is_struck and "program" in way:
            burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        if is_struck and "thread" in way:
            threading.Thread(target=_burn, args=(ended,), daemon=True).start()
        try:
            _rounds(1.0)  # the row in which it begins belongs to neither side
            sampler.take()
            now_s = _rounds(
                _SLOW_S,
                sleep_s=usual_s if is_struck and "sleeps" in way else 0.0,
                times=2 if is_struck and "twice" in way else 1,
            )
            rows = [row for _, row in sampler.take()]
        finally:
            ended.set()
            if burner is not None:
                burner.kill()
                burner.wait()
        ranks.barrier()
    made: HostVerdict = verdict(now_s, usual_s, np.array(rows), np.array(usual))
    return made.whose, made.slower, made.neighbour_share, made.text


def _burn(ended: threading.Event) -> None:
    square = np.ones((_SIZE, _SIZE))
    while not ended.is_set():
        np.einsum("ij,kj->ik", square, square)  # without the interpreter's lock


def _rounds(seconds: float, *, sleep_s: float = 0.0, times: int = 1) -> float:
    """Compute for some seconds; the median length of a round [s]."""
    square = torch.ones(_SIZE, _SIZE)
    lengths, until = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        for _ in range(_PRODUCTS * times):
            square @ square
        time.sleep(sleep_s)
        lengths.append(time.perf_counter() - began)
    return statistics.median(lengths)


def main() -> None:
    """Print the verdicts on both ranks by what was done to rank 1."""
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("Two ranks need a core each, and this process may use one.")
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    answer = {}
    for way, right in _WAYS.items():
        struck, other, slower, words = Counter[str](), Counter[str](), [], ""
        for _ in range(trials):
            still, hit = run_ranks(2, slowed, way, timeout_s=120.0)
            struck[hit[0]] += 1
            other[still[0]] += 1
            slower.append(round(hit[1], 2))
            words = hit[3]
        answer[way] = {
            "right": struck[right],
            "trials": trials,
            "rank 1": dict(struck),
            "rank 0": dict(other),
            "slower": slower,
            "words": words,
        }
    print(json.dumps({"bench": Path(__file__).stem, "environment": environment(), "ways": answer}))


if __name__ == "__main__":
    main()
