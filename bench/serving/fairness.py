"""Policies of fairness on one engine: mean response of short and of long jobs.

Everything runs through the engine's scheduler, with predicted seconds as the clock. Five tenants
ask for 1.1 times what the device can do, for 400 s: some send long prompts (15 s of work each),
the others short ones (0.5 s each). Prompts are computed in chunks (*partitioned*), or each in one
iteration. Jobs are misjudged by a factor drawn from 0.5 to 1.5, or not at all; only UWFQ reads it.

Beside them stand the figures of the probe that this work began with: another, simplified simulator
of 8 slots. They are for comparison of shape.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

from equipoise.cost.serving import CurvePrice
from equipoise.schedule.batching.fair.policy import FairJob, FairPolicy, Key, MakePolicy
from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.schedule.batching.settings import BatchSettings
from equipoise.sim.serve.run import run_trace
from equipoise.spec.device.serving import ServingCurve
from equipoise.spec.request_trace import TracedRequest

TOKEN_S = 2.5e-4
SHORT_TOKENS, LONG_TOKENS, OUTPUT_TOKENS = 2000, 60_000, 4
ARRIVALS_S, LOAD, SHORT_LOAD = 400.0, 1.1, 0.15
SEEDS = range(5)
GOAL = {"short jobs over user-fair": 0.3, "long jobs over user-fair": 1.0}
PROBE = {
    "fifo": (44.1, 42.7),
    "job-fair": (39.2, 55.9),
    "user-fair": (1.82, 60.0),
    "uwfq whole": (2.22, 44.2),
    "uwfq partitioned": (0.54, 44.7),
}

# A token costs the same everywhere; an iteration costs 1 ms more.
PRICE = CurvePrice(
    ServingCurve(
        tokens=((1, 1e-3 + TOKEN_S), (8192, 1e-3 + 8192 * TOKEN_S)),
        logits=((1, 0.0),),
        pair_s=0.0,
        kv_token_s=0.0,
        sequence_s=0.0,
        swap_token_s=1e-6,
    )
)


class Misjudged:
    """A policy that hears a wrong estimate of each job."""

    def __init__(self, inner: FairPolicy, error: float, seed: int) -> None:
        self._inner = inner
        self._error = error
        self._seed = seed

    @property
    def divides_by_tenant(self) -> bool:
        return self._inner.divides_by_tenant

    def arrive(self, job: FairJob, now_s: float) -> None:
        draw = random.Random(f"{self._seed}/{job.id}")
        factor = draw.uniform(1 - self._error, 1 + self._error)
        self._inner.arrive(
            FairJob(job.id, job.tenant, job.arrival_s, job.work_s * factor, job.stage_of), now_s
        )

    def first(self) -> str | None:
        return self._inner.first()

    def take(self, job_id: str, ahead_s: float) -> None:
        self._inner.take(job_id, ahead_s)

    def wait(self, job_id: str) -> None:
        self._inner.wait(job_id)

    def key(self, job_id: str) -> Key:
        return self._inner.key(job_id)

    def charge(self, job_id: str, work_s: float) -> None:
        self._inner.charge(job_id, work_s)

    def finish(self, job_id: str, now_s: float) -> None:
        self._inner.finish(job_id, now_s)


def misjudging(make: MakePolicy, error: float, seed: int) -> MakePolicy:
    def made(weights: Mapping[str, float], grace_s: float) -> FairPolicy:
        return Misjudged(make(weights, grace_s), error, seed)

    return made


def draw_trace(long_tenants: int, seed: int) -> list[TracedRequest]:
    """Poisson arrivals of five tenants, ``long_tenants`` of them with long jobs."""
    draw = random.Random(seed)
    trace = []
    for number in range(5):
        is_long = number < long_tenants
        tokens = LONG_TOKENS if is_long else SHORT_TOKENS
        load = LOAD - SHORT_LOAD if is_long else SHORT_LOAD
        tenants = long_tenants if is_long else 5 - long_tenants
        every_s = tokens * TOKEN_S / (load / tenants)
        at_s = draw.expovariate(1 / every_s)
        while at_s < ARRIVALS_S:
            name = f"{'long' if is_long else 'short'} {number}"
            trace.append(TracedRequest(at_s, name, tokens, OUTPUT_TOKENS, OUTPUT_TOKENS))
            at_s += draw.expovariate(1 / every_s)
    return trace


def means(policy: str, long_tenants: int, *, is_chunked: bool, error: float) -> dict[str, float]:
    """Mean response of short and long jobs over all seeds [s]."""
    limits = BatchSettings(
        100_000, most_sequences=256, queued_requests=100_000, is_chunked=is_chunked
    )
    short, long = [], []
    for seed in SEEDS:
        maker = misjudging(FAIR_POLICIES[policy], error, seed)
        run = run_trace(draw_trace(long_tenants, seed), limits, PRICE, maker)
        for each in run.requests:
            is_short = each.traced.prompt_tokens == SHORT_TOKENS
            (short if is_short else long).append(each.latency_s)
    return {"short_s": statistics.mean(short), "long_s": statistics.mean(long)}


def least_short_s(long_tenants: int) -> float:
    """Mean response of short jobs if there were no long ones [s]: no policy gets below that."""
    limits = BatchSettings(100_000, most_sequences=256, queued_requests=100_000)
    latencies = []
    for seed in SEEDS:
        trace = [each for each in draw_trace(long_tenants, seed) if each.tenant.startswith("short")]
        run = run_trace(trace, limits, PRICE, FAIR_POLICIES["uwfq"])
        latencies += [each.latency_s for each in run.requests]
    return statistics.mean(latencies)


def measure() -> dict[str, Any]:
    begin_s = time.perf_counter()
    mixes = {}
    for long_tenants in (4, 3, 2):
        rows = []
        for is_chunked in (True, False):
            for policy in FAIR_POLICIES:
                errors = (0.0, 0.5) if policy == "uwfq" else (0.0,)
                for error in errors:
                    row = means(policy, long_tenants, is_chunked=is_chunked, error=error)
                    rows.append(
                        {"policy": policy, "partitioned": is_chunked, "error": error, **row}
                    )
        base = next(r for r in rows if r["policy"] == "user-fair" and r["partitioned"])
        best = next(r for r in rows if r["policy"] == "uwfq" and r["partitioned"])
        mixes[f"{long_tenants} tenants with long jobs, {5 - long_tenants} with short ones"] = {
            "rows": rows,
            "uwfq over user-fair, short jobs": best["short_s"] / base["short_s"],
            "uwfq over user-fair, long jobs": best["long_s"] / base["long_s"],
            "short jobs without long ones, over user-fair": least_short_s(long_tenants)
            / base["short_s"],
        }
    return {
        "goal": GOAL,
        "mixes": mixes,
        "probe (short_s, long_s)": PROBE,
        "note": "Only UWFQ reads estimates, so other policies have no row with an error.",
        "seconds": time.perf_counter() - begin_s,
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
