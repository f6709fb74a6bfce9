"""Benches, each in a process of its own: ``python -m bench.run`` for all, or with names."""

import os
import subprocess
import sys
from pathlib import Path

from equipoise.launch.agent import ALLOCATOR

BENCHES = {
    "throughput": "local.throughput",
    "ranks": "local.ranks",
    "start": "local.start",
    "memory": "local.memory",
    "packing": "local.packing",
    "wlb": "local.wlb",
    "context": "local.context",
    "groups": "local.groups",
    "attention": "local.attention",
    "pipeline": "local.pipeline",
    "pipeline_ranks": "local.pipeline_ranks",
    "experts": "local.experts",
    "zero": "peers.zero",
    "boxing": "local.boxing",
    "collectives": "published.collectives",
    "calibrate": "local.calibrate",
    "plans_real": "planner.real",
    "kernels": "local.kernels",
    "stream": "local.stream",
    "bubbles": "published.bubbles",
    "throughput_published": "published.throughput",
    "memory_published": "published.memory",
    "offload": "published.offload",
    "ranking": "published.ranking",
    "peers_foresight": "peers.foresight",
    "planner": "planner.search",
    "layered": "planner.layered",
    "measured_search": "planner.measured_search",
    "plans_published": "planner.published",
}


def main() -> None:
    """Write ``bench/results/NAME.json`` and print each file's name."""
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    # The allocator setting that the launcher gives its ranks, for both sides of a comparison.
    tunables = {**os.environ, "OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": ALLOCATOR}
    names = sys.argv[1:] or list(BENCHES)
    if unknown := sorted(set(names) - set(BENCHES)):
        sys.exit(f"No such bench: {', '.join(unknown)}. All: {', '.join(BENCHES)}")
    for name in names:
        file = results / f"{name}.json"
        with file.open("w") as out:
            module = f"bench.{BENCHES[name]}"
            subprocess.run([sys.executable, "-m", module], stdout=out, check=True, env=tunables)
        print(file)


if __name__ == "__main__":
    main()
