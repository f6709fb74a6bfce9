"""Plans whose layers pick their own strategies, on large presets: search time and gain.

Each search first runs as ``equipoise plan`` does, all layers alike, for 30 s; ``--layers own``
begins from its result. Steps of both are simulated. If memory is to spare, no layer has to differ
and nothing is gained.
"""

import argparse
import json
import time
from typing import Any

from bench.lib.stamp import LoadStamp, environment
from equipoise.plan.answer.final import price_finalists
from equipoise.plan.described import PlanRequest, read_inputs
from equipoise.plan.layers.search import plan_layers
from equipoise.sim.step import StepRun

SEARCH_S, LAYERS_S = 30.0, 60.0
CASES = (
    PlanRequest("llama2-70b", "h100-sxm:64", 4096, 256, layers="own"),
    PlanRequest("llama3-405b", "h100-sxm:1024", 8192, 512, layers="own"),
    PlanRequest("llama3-405b", "h100-sxm:256", 8192, 512, layers="own"),
    PlanRequest("llama3-70b", "a100-80:64", 8192, 128, layers="own"),
)


def search(request: PlanRequest) -> dict[str, Any]:
    """One case: all layers alike, then each by itself."""
    inputs, stamp = read_inputs(request), LoadStamp()
    begin = time.perf_counter()
    outcome = inputs.search.run(seconds=SEARCH_S)
    best = price_finalists(inputs.search, outcome)[0]
    between = time.perf_counter()
    layered = plan_layers(inputs.search, outcome)
    end = time.perf_counter()
    alike_s = best.run.price.step_s
    own_s = alike_s if layered is None else layered.run.price.step_s
    return {
        "plan": request.asked(),
        "layers": inputs.search.model.layers,
        "search_s": between - begin,
        "layers_s": end - between,
        "alike": best.choice.words() | _figures(best.run),
        "own": None
        if layered is None
        else layered.choice.words()
        | {"strategies": len(set(layered.layers))}
        | _figures(layered.run),
        "gain": 1.0 - own_s / alike_s,
        "other_load": stamp.other_load(),
    }


def _figures(run: StepRun) -> dict[str, Any]:
    return {"step_s": run.price.step_s, "memory_bytes": float(run.price.memory_bytes.max())}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    report = {
        "what": "seconds of a search with all layers alike, and of one by layers after it; steps "
        "are simulated",
        "goal": {"layers_s": LAYERS_S},
        "environment": environment(),
        "cases": [search(request) for request in CASES],
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
