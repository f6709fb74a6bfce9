"""Is the rank that hangs the one that is named, and how soon?

Each trial starts real ranks over gloo. After some collectives one rank stops (SIGSTOP), sleeps or
computes for ever, while the others wait in a collective of all, in one of two ranks, or for a
message. What is judged is the first verdict: its culprits must be that rank alone, and its
operation the one in which that rank is missing.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from bench.lib.stamp import LoadStamp, environment
from equipoise.base.errors import FaultError
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.comm.mail import Mail, Parcel
from equipoise.comm.standstill import Standstill
from equipoise.comm.watchdog import Watchdog

_WORLD, _DEADLINE_S = 3, 1.0
_WAYS = ("stopped", "asleep", "busy")
_OPERATIONS = ("all_reduce", "all_gather", "all_to_all", "messages", "all_reduce of two")


def hang(ranks: Ranks, folder: Path, seed: int) -> None:
    """One rank hangs; which, how and before what, ``draw`` says."""
    culprit, way, operation, calls = draw(seed)
    store = dist.FileStore(str(folder / "beats"), ranks.world)

    def tell(standstill: Standstill) -> None:
        word = {
            "at": time.monotonic(),
            "culprits": standstill.culprits,
            "what": standstill.what,
            "place": Path(next(iter(standstill.stacks.get(str(culprit), [])), "")).name,
        }
        partial = folder / f".told-{ranks.rank}"
        partial.write_text(json.dumps(word))  # others may end this rank meanwhile
        partial.rename(folder / f"told-{ranks.rank}")

    pairs = [dist.new_group(pair) for pair in ([0, 1], [1, 2], [0, 2])]
    with Watchdog(store, ranks.rank, ranks.world, deadline_s=_DEADLINE_S, tell=tell) as watchdog:
        for _ in range(calls):
            dist.all_reduce(torch.ones(8))
        ranks.barrier()
        with watchdog.phase("forward of step 7"):
            if ranks.rank == culprit:
                (folder / "began").write_text(str(time.monotonic()))
                _hang(way)
            _meet(ranks, operation, culprit, pairs)
            ranks.barrier()  # who was not in the operation waits here


def draw(seed: int) -> tuple[int, str, str, int]:
    """The rank, the way, the operation, and how many collectives come before."""
    numbers = random.Random(seed)
    return (
        numbers.randrange(_WORLD),
        numbers.choice(_WAYS),
        numbers.choice(_OPERATIONS),
        numbers.randrange(100),
    )


def _hang(way: str) -> None:
    if way == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if way == "asleep":
            time.sleep(1)


def _meet(ranks: Ranks, operation: str, culprit: int, pairs: list[dist.ProcessGroup]) -> None:
    some, whole = torch.ones(2 * ranks.world), torch.empty(2 * ranks.world**2)
    if operation == "all_reduce":
        dist.all_reduce(some)
    elif operation == "all_gather":
        dist.all_gather_single(whole, some)
    elif operation == "all_to_all":
        dist.all_to_all_single(torch.empty_like(some), some)
    elif operation == "messages":
        mail = Mail()
        mail.post([], [Parcel(culprit, 5, torch.zeros(8, dtype=torch.uint8), due=1)])
        mail.wait(1)
    else:
        for pair, group in zip(([0, 1], [1, 2], [0, 2]), pairs, strict=True):
            if ranks.rank in pair and culprit in pair:
                dist.all_reduce(some, group=group)


def trial(seed: int) -> dict[str, object]:
    """One hang, and what was said of it."""
    culprit, way, operation, calls = draw(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with suppress(FaultError):
            run_ranks(_WORLD, hang, folder, seed, timeout_s=60.0)
        told = [json.loads(each.read_text()) for each in folder.glob("told-*")]
        began = float((folder / "began").read_text())
    row: dict[str, object] = {"seed": seed, "rank": culprit, "way": way, "operation": operation}
    if not told:
        return row | {"right": False, "said": None}
    first = min(told, key=lambda each: each["at"])
    words = operation.partition(" ")[0], "barrier"  # of a pair, the third rank waits there
    is_right = first["culprits"] == [culprit] and first["what"].startswith(words)
    after_s = first["at"] - began
    return row | {"right": is_right, "after_s": after_s, "said": first, "calls": calls}


def main() -> None:
    """Print how many hangs were named rightly, and after how long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    trials = parser.parse_args().trials
    stamp = LoadStamp()
    rows = [trial(seed) for seed in range(trials)]
    after = [float(str(row["after_s"])) for row in rows if "after_s" in row]
    answer = {
        "trials": trials,
        "right": sum(bool(row["right"]) for row in rows),
        "wrong": [row for row in rows if not row["right"]],
        "after_s": {"median": statistics.median(after), "max": max(after)},
        "deadline_s": _DEADLINE_S,
        "other_load": stamp.other_load(),
        "environment": environment(),
    }
    json.dump(answer, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
