"""Benches, each in a process of its own: ``python -m bench.run`` for all, or with names."""

import os
import subprocess
import sys
from pathlib import Path

from equipoise.launch.agent import ALLOCATOR

BENCHES = (
    "throughput",
    "ranks",
    "start",
    "memory",
    "packing",
    "wlb",
    "context",
    "groups",
    "attention",
    "pipeline",
    "pipeline_ranks",
    "experts",
    "zero",
    "boxing",
    "collectives",
    "calibrate",
    "plans_real",
    "kernels",
    "stream",
    "bubbles",
    "throughput_published",
    "memory_published",
    "offload",
    "ranking",
    "peers_foresight",
    "planner",
    "layered",
    "measured_search",
    "plans_published",
)


def main() -> None:
    """Write ``bench/results/NAME.json`` and print each file's name."""
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    # The allocator setting that the launcher gives its ranks, for both sides of a comparison.
    tunables = {**os.environ, "OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": ALLOCATOR}
    for name in sys.argv[1:] or BENCHES:
        file = results / f"{name}.json"
        with file.open("w") as out:
            subprocess.run(
                [sys.executable, "-m", f"bench.{name}"], stdout=out, check=True, env=tunables
            )
        print(file)


if __name__ == "__main__":
    main()
