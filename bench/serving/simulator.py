"""How long the simulator takes for 10,000 requests; the goal is 2 s.

Three loads of one engine, each under first come, first served and under UWFQ: few requests at a
time, many, and more than memory for keys and values holds.
"""

import json
import random
import statistics
import sys
import time
from typing import Any

from bench.lib.stamp import LoadStamp
from equipoise.cost.serving import CurvePrice
from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.schedule.batching.settings import BatchSettings
from equipoise.sim.serve.run import run_trace
from equipoise.spec.device.serving import ServingCurve
from equipoise.spec.request_trace import TracedRequest

REQUESTS, GOAL_S, RUNS = 10_000, 2.0, 3
# Of the size of an 8B model on one GPU.
CURVE = ServingCurve(
    tokens=((1, 0.008), (64, 0.009), (512, 0.03), (8192, 0.45)),
    logits=((1, 1e-4), (64, 2e-4)),
    pair_s=2e-10,
    kv_token_s=5e-9,
    sequence_s=1e-5,
    swap_token_s=1e-6,
)
LOADS = {
    "5 requests a second": (5.0, 20_000),
    "20 requests a second": (20.0, 20_000),
    "20 requests a second, memory for 40,000 tokens": (20.0, 2_500),
}


def draw_trace(rate: float) -> list[TracedRequest]:
    """Poisson arrivals of five tenants, prompts around 250 tokens, 200 generated."""
    draw = random.Random(0)
    at_s, trace = 0.0, []
    for _ in range(REQUESTS):
        at_s += draw.expovariate(rate)
        output = 1 + int(draw.expovariate(1 / 200))
        prompt = 1 + int(draw.lognormvariate(5.5, 1))
        trace.append(TracedRequest(at_s, f"t{draw.randrange(5)}", prompt, output, output))
    return trace


def measure() -> dict[str, Any]:
    stamp, rows = LoadStamp(), []
    for name, (rate, pages) in LOADS.items():
        trace = draw_trace(rate)
        limits = BatchSettings(pages, most_sequences=256, queued_requests=REQUESTS + 1)
        for policy in ("fifo", "uwfq"):
            wall_s, own_s = [], []
            for _ in range(RUNS):
                begin = time.perf_counter(), time.process_time()
                run = run_trace(trace, limits, CurvePrice(CURVE), FAIR_POLICIES[policy])
                wall_s.append(time.perf_counter() - begin[0])
                own_s.append(time.process_time() - begin[1])
            rows.append(
                {
                    "load": name,
                    "policy": policy,
                    "seconds": statistics.median(wall_s),
                    "cpu_seconds": statistics.median(own_s),
                    "iterations": sum(each.iterations for each in run.replicas),
                    "preemptions": sum(each.preemptions for each in run.replicas),
                }
            )
    return {
        "goal_s": GOAL_S,
        "requests": REQUESTS,
        "rows": rows,
        "other_load_cores": stamp.other_load(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
