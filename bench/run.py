"""Run benches, each in its own process: ``python -m bench.run``, all of them or those named."""

import os
import subprocess
import sys
from pathlib import Path

from equipoise.launch.agent import ALLOCATOR

BENCHES = (
    "local.throughput",
    "local.ranks",
    "local.start",
    "local.memory",
    "local.checkpoint",
    "local.packing",
    "local.wlb",
    "local.context",
    "local.groups",
    "local.attention",
    "local.pipeline",
    "local.pipeline_ranks",
    "local.experts",
    "experts.policies",
    "experts.speculative",
    "modality.throughput",
    "overlap.parts",
    "overlap.shortcut",
    "overlap.tiers",
    "serving.engine",
    "serving.context",
    "serving.nano",
    "serving.hostile",
    "serving.soak",
    "serving.vllm",
    "peers.zero",
    "peers.sft",
    "local.boxing",
    "published.collectives",
    "local.calibrate",
    "planner.real",
    "local.kernels",
    "local.stream",
    "published.bubbles",
    "published.throughput",
    "published.fresh",
    "published.intervals",
    "published.memory",
    "published.offload",
    "published.dispatch",
    "published.experts",
    "published.ranking",
    "published.wlb",
    "peers.balance",
    "peers.foresight",
    "planner.search",
    "planner.experts",
    "planner.joint_experts",
    "planner.fewest_copies",
    "planner.tables",
    "recsys.sessions",
    "recsys.precision",
    "recsys.tiers",
    "recsys.ranking",
    "recsys.beside_torchrec",
    "recsys.leaks",
    "planner.layered",
    "planner.measured_search",
    "planner.published",
    "planner.frontier",
    "planner.vast",
    "planner.monotone",
    "serving.fairness",
    "serving.simulator",
    "serving.plans",
    "interference.compare",
    "interference.whose",
    "interference.live",
    "faults.hangs",
    "faults.kills",
    "faults.flips",
    "faults.slow_ranks",
    "recsys.models",
    "recsys.file_order",
    "recsys.ensemble",
    "recsys.scaling",
    "recsys.tuning",
    "recsys.towers",
)


def main() -> None:
    """Write ``bench/results/ROOM/NAME.json`` for each bench ROOM.NAME, and print its path."""
    results = Path(__file__).parent / "results"
    # The allocator setting that the launcher gives its ranks, for both sides of a comparison.
    tunables = {**os.environ, "OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": ALLOCATOR}
    names = sys.argv[1:] or BENCHES
    if unknown := sorted(set(names) - set(BENCHES)):
        sys.exit(f"No such bench: {', '.join(unknown)}. All: {', '.join(BENCHES)}")
    for name in names:
        file = results / f"{name.replace('.', '/')}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") as out:
            bench = [sys.executable, "-m", f"bench.{name}"]
            subprocess.run(bench, stdout=out, check=True, env=tunables)
        print(file)


if __name__ == "__main__":
    main()
