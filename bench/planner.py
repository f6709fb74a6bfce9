"""The planner's speed: bounds of every choice, and a whole search of the largest published case.

Llama 3 405B on 16,384 H100s with the document lengths of a long-context corpus: how many choices
are judged in a second on one core, and how far a search is after 10 s and after 60.
"""

import argparse
import json
import time
from typing import Any

from bench.stamp import LoadStamp, environment, spread
from equipoise.cli.simulate_setting import step_documents
from equipoise.cost.step import StepOptions
from equipoise.plan.bound import least_bytes, least_seconds
from equipoise.plan.choice import Choice
from equipoise.plan.search import Search
from equipoise.plan.space import list_space
from equipoise.sim.machine import Machine
from equipoise.sim.step import Documents
from equipoise.spec.cluster import find_cluster
from equipoise.spec.model import PLANNED

MODEL, DEVICES = "llama3-405b", 16_384
GOAL = {"choices_per_s": 200_000, "search_s": 10.0}


def judge() -> dict[str, Any]:
    """List the space, bound its memory and its time."""
    model, machine = PLANNED[MODEL], Machine(find_cluster(f"h100-sxm:{DEVICES}"))
    rates, choices = [], 0
    for _ in range(5):
        begin = time.process_time()
        space = list_space(model, DEVICES, StepOptions(8192, 2048))
        least_bytes(model, space)
        least_seconds(model, machine, space)
        choices = len(space)
        rates.append(choices / (time.process_time() - begin))
    return {"choices": choices, "choices_per_s": spread(rates)}


def search(seconds: float, lengths: str | None) -> dict[str, Any]:
    """One search from nothing."""
    begin, cpu, load = time.perf_counter(), time.process_time(), LoadStamp()
    model, machine = PLANNED[MODEL], Machine(find_cluster(f"h100-sxm:{DEVICES}"))
    words = argparse.Namespace(model=MODEL, lengths=lengths, policy="by-work", seed=0)

    def pack(choice: Choice) -> Documents:
        packed = step_documents(words, choice.layout, choice.options)
        if packed is None:
            raise RuntimeError("no lengths")
        return packed

    space = list_space(model, DEVICES, StepOptions(8192, 2048))
    asked = Search(model, machine, space, packer=pack if lengths else None)
    found = asked.run(seconds=seconds)
    best = found.fitting[0]
    return {
        "lengths": lengths or "full windows",
        "seconds_allowed": seconds,
        "wall_s": time.perf_counter() - begin,
        "cpu_s": time.process_time() - cpu,
        "other_load_cores": load.other_load(),
        "choices": found.listed,
        "families": found.bounded,
        "replayed": found.progress.priced,
        "best_s": best.step_s,
        "best": space.choice(best.row).words(),
        "bound_s": found.progress.bound_s,
        "gap": found.progress.gap,
        "is_whole": found.progress.gap <= asked.gap,
    }


def main() -> None:
    found = {
        "environment": environment(),
        "goal": GOAL,
        "judge": judge(),
        "searches": [
            search(10.0, "pretrain-128k"),
            search(10.0, None),
            search(60.0, "pretrain-128k"),
        ],
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
