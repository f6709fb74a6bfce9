"""Plans whose layers pick their own strategies, on large presets: what they take and gain.

Each search first runs as ``equipoise plan`` does, all layers alike, for 30 s; ``--layers own``
begins from what it has found. Steps of both are simulated. Where memory is to spare no layer has
to differ, and nothing is gained.
"""

import argparse
import json
import time
from typing import Any

from bench.lib.stamp import LoadStamp, environment
from equipoise.cli.main import parse
from equipoise.cli.plan import verb as plan
from equipoise.cli.plan.lock import read_inputs
from equipoise.plan.answer.final import price_finalists
from equipoise.plan.layers.search import plan_layers
from equipoise.plan.search.deadline import NEVER
from equipoise.sim.step import StepRun

SEARCH_S, LAYERS_S = 30.0, 60.0
CASES = (
    "--model llama2-70b --cluster h100-sxm:64 --context-tokens 4096 --step-sequences 256",
    "--model llama3-405b --cluster h100-sxm:1024 --context-tokens 8192 --step-sequences 512",
    "--model llama3-405b --cluster h100-sxm:256 --context-tokens 8192 --step-sequences 512",
    "--model llama3-70b --cluster a100-80:64 --context-tokens 8192 --step-sequences 128",
)


def search(words: str) -> dict[str, Any]:
    """One case: all layers alike, then each by itself."""
    args = parse("plan", plan, [*words.split(), "--layers", "own"])
    inputs, stamp = read_inputs(args, NEVER), LoadStamp()
    begin = time.perf_counter()
    outcome = inputs.search.run(seconds=SEARCH_S)
    best = price_finalists(inputs.search, outcome)[0]
    between = time.perf_counter()
    found = plan_layers(inputs.search, outcome)
    end = time.perf_counter()
    alike_s = best.run.price.step_s
    own_s = alike_s if found is None else found.run.price.step_s
    return {
        "plan": words,
        "layers": inputs.search.model.layers,
        "search_s": between - begin,
        "layers_s": end - between,
        "alike": best.choice.words() | _figures(best.run),
        "own": None
        if found is None
        else found.choice.words() | {"strategies": len(set(found.layers))} | _figures(found.run),
        "gain": 1.0 - own_s / alike_s,
        "other_load": stamp.other_load(),
    }


def _figures(run: StepRun) -> dict[str, Any]:
    return {"step_s": run.price.step_s, "memory_bytes": float(run.price.memory_bytes.max())}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = {
        "what": "seconds of a search with all layers alike, and of one by layers after it; steps "
        "are simulated",
        "goal": {"layers_s": LAYERS_S},
        "environment": environment(),
        "cases": [search(words) for words in CASES],
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
