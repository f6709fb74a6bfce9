"""Plans of spaces that are too large to list: seconds, memory, and the first answer.

Every preset of 7 billion weights or more on up to 16,384 devices, and Llama 3 405B on 99,840 over
three sites: each by ``equipoise plan`` in a process of its own, with 10 s (30 s) and with 3 s.

Seconds are processor seconds of one core, by which the planner's own deadline counts here, too: a
machine that others use would give some plans half of their time. On an idle machine they are wall
seconds of one core, and with more cores the search gets further. Beside the steps found: the bound,
all processor seconds of the process, its start and reading included, and the most memory it held.
"""

import argparse
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.lib.stamp import LoadStamp, environment
from equipoise.spec.model.presets import PLANNED

GOAL = {"seconds": 10.0, "memory_gb": 1.0, "first_within": 0.05, "sites_seconds": 30.0}

_LEAST = 7e9
_SITES = """name = "three-sites"
between = "roce-400"
trunk_gbit_per_s = 800
""" + "".join(
    f'[[nodes]]\nname = "{name}"\ndevice = "h100-sxm"\nnodes = 4160\n'
    for name in ("north", "west", "south")
)


def cases() -> list[list[str]]:
    """Arguments of each plan."""

    def words(model: str, cluster: str, window: int, sequences: int, *more: str) -> list[str]:
        step = ["--context-tokens", str(window), "--step-sequences", str(sequences)]
        return ["--model", model, "--cluster", cluster, *step, *more]

    fp8 = ["--precision", "fp8"]
    known = [
        words("deepseek-v3", "h800:2048", 4096, 15_360, *fp8),
        words("deepseek-v3", "h800:2048", 4096, 15_360, *fp8, "--program", "hai-llm"),
        words("qwen3-235b-a22b", "h100-sxm:1024", 4096, 4096, "--program", "megatron-core"),
    ]
    large = [name for name, spec in PLANNED.items() if spec.params >= _LEAST]
    return known + [words(name, "h100-sxm:16384", 4096, 16_384) for name in large]


def by_processor(arguments: list[str]) -> None:
    """``equipoise plan`` on one core, whose seconds are those of this process's processor."""
    alarm = signal.setitimer

    def set_timer(_: int, seconds: float, again: float = 0.0) -> tuple[float, float]:
        return alarm(signal.ITIMER_PROF, seconds, again)

    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    time.monotonic = time.process_time  # type: ignore[assignment]
    signal.setitimer = set_timer  # type: ignore[assignment]
    signal.SIGALRM = signal.SIGPROF  # type: ignore[misc,assignment]
    sys.argv = ["equipoise", "plan", *arguments]
    runpy.run_module("equipoise.cli.main", run_name="__main__")


def run(arguments: list[str], seconds: float) -> dict[str, Any]:
    """One plan in a process of its own."""
    command = [sys.executable, "-m", "bench.planner.vast", "--plan", *arguments]
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        limit = ["--seconds", str(seconds), "--json"]
        child = subprocess.Popen([*command, *limit], stdout=out, stderr=err)
        _, status, used = os.wait4(child.pid, 0)
        out.seek(0)
        err.seek(0)
        if status:
            return {"refused": err.read().decode().splitlines()[-1:]}
        lock = json.load(out)
    return {
        "best": lock["best"]["words"],
        "step_s": lock["best"]["price"]["step_s"],
        "fits": lock["best"]["price"]["memory_gib_max"] <= lock["best"]["price"]["capacity_gib"],
        "bound_s": lock["bound_s"],
        "gap": lock["gap"],
        "listed": lock["listed"],
        "priced": lock["priced"],
        "remarks": lock["remarks"],
        "wall_s": time.perf_counter() - begin,
        "cpu_s": used.ru_utime + used.ru_stime,
        "memory_gb": used.ru_maxrss * 1024 / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--plan", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if asked.plan is not None:
        by_processor(asked.plan)
        return
    stamp, rows = LoadStamp(), []
    for arguments in cases():
        if asked.only in " ".join(arguments):
            whole, first = run(arguments, 10.0), run(arguments, 3.0)
            late = first.get("step_s", float("inf")) / whole.get("step_s", float("nan")) - 1.0
            rows.append({"plan": " ".join(arguments), **whole, "first_slower_by": late})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "three-sites.toml"
        file.write_text(_SITES)
        step = ["--context-tokens", "8192", "--step-sequences", "24960"]
        sites = ["--model", "llama3-405b", "--cluster", str(file), *step]
        if asked.only in " ".join(sites):
            rows.append({"plan": "llama3-405b, 99,840 devices", **run(sites, 30.0)})
    head = {"environment": environment(), "goal": GOAL, "other_load": stamp.other_load()}
    print(json.dumps(head | {"plans": rows}, indent=1))


if __name__ == "__main__":
    main()
