"""The simulator beside our own engine: eight settings, six traces, errors and their order.

Every setting is a process of its own that serves SmolLM2-135M on this machine: two threads or one,
two ranks that share every sequence, other iteration budgets, policies and sizes of the cache. It
serves six traces in real time; the simulator serves the same ones with the curve that the engine
measured of itself when it started. None of the traces was used to measure that curve.

``python -m bench.serving.plans tiny`` runs three requests of each trace, to see that all runs.
"""

import json
import random
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch

from bench.lib.stamp import LoadStamp, environment
from bench.serving.engine import smollm2
from equipoise.cost.serving import CurvePrice
from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.serve.engine.build import EngineSettings, open_engine
from equipoise.serve.engine.loop import EngineLoop
from equipoise.serve.engine.request import GenerateRequest, TokenEvent
from equipoise.serve.source import open_model
from equipoise.sim.serve.run import run_trace
from equipoise.spec.device.serving import ServingCurve, read_serving, serving_file, serving_name
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.request_trace import TracedRequest

GOALS = {"error": 0.10, "tau": 0.8}
METRICS = ("ttft_s", "tpot_s", "tokens_per_s")
DTYPE = "bf16"
TINY, TRIES = 3, 5


@dataclass(frozen=True)
class Setting:
    """One way to run the engine."""

    threads: int
    more: Mapping[str, Any]


PLANS = {
    "two threads": Setting(2, {}),
    "two threads, 20 ms": Setting(2, {"iteration_s": 0.02}),
    "two threads, 200 ms": Setting(2, {"iteration_s": 0.2}),
    "two threads, 4 at a time": Setting(2, {"most_sequences": 4}),
    "two threads, room for 4,096 tokens": Setting(2, {"cache_tokens": 4096}),
    "two threads, uwfq": Setting(2, {"policy": "uwfq"}),
    "one thread": Setting(1, {}),
    "two ranks": Setting(1, {"context_ranks": 2}),
}

TRACES: dict[str, tuple[int, float, tuple[int, int], tuple[int, int], int]] = {
    # requests, a second, tokens of a prompt, of an answer, of a preamble
    "chat": (30, 1.5, (50, 400), (20, 60), 0),
    "long prompts": (8, 0.15, (1500, 3000), (10, 20), 0),
    "mixed": (24, 0.8, (50, 2500), (10, 60), 0),
    "burst": (24, 0.0, (100, 300), (24, 40), 0),
    "long answers": (16, 0.5, (50, 100), (80, 160), 0),
    "preamble": (24, 1.2, (560, 640), (20, 40), 512),
}


def draw_trace(name: str, requests: int) -> list[TracedRequest]:
    """Requests of two tenants, at random times."""
    count, rate, prompts, outputs, preamble = TRACES[name]
    draw = random.Random(name)
    at_s, rows = 0.0, []
    for _ in range(min(count, requests)):
        output = draw.randint(*outputs)
        rows.append(
            TracedRequest(
                at_s,
                draw.choice("ab"),
                draw.randint(*prompts),
                output,
                output,
                "preamble" if preamble else "",
                preamble,
            )
        )
        at_s += draw.expovariate(rate) if rate else 0.0
    return sorted(rows)


def tokens_of(request: TracedRequest, seed: int) -> tuple[int, ...]:
    """A prompt that begins like those of its group, and goes on like no other."""
    common = np.random.default_rng(0).integers(100, 40_000, request.prefix_tokens)
    rest = request.prompt_tokens - request.prefix_tokens
    own = np.random.default_rng([1, seed]).integers(100, 40_000, rest)
    return tuple(np.concatenate([common, own]).tolist())


def serve(engine: EngineLoop, name: str, trace: Sequence[TracedRequest]) -> dict[str, float]:
    """The engine's times of a trace, as its clients see them."""
    times: list[list[float]] = [[] for _ in trace]

    def listen(at: int) -> Callable[[object], None]:
        def deliver(event: object) -> None:
            if isinstance(event, TokenEvent) and event.token is not None:
                times[at].append(time.perf_counter())

        return deliver

    # A name makes tenants of one trace, so that no page of another one is in their cache.
    given = [
        GenerateRequest(
            tokens_of(each, zlib.crc32(f"{name}-{at}".encode())),
            most_tokens=each.output_tokens,
            ignores_end=True,
            tenant=f"{name}-{each.tenant}",
        )
        for at, each in enumerate(trace)
    ]
    begin = time.perf_counter()
    for at, (each, request) in enumerate(zip(trace, given, strict=True)):
        time.sleep(max(0.0, begin + each.arrival_s - time.perf_counter()))
        engine.submit(request, deliver=listen(at))
    while any(len(got) < each.output_tokens for got, each in zip(times, trace, strict=True)):
        time.sleep(0.01)
    firsts = [got[0] - begin for got in times]
    lasts = [got[-1] - begin for got in times]
    return summary(trace, firsts, lasts)


def simulate(
    engine: EngineLoop, policy: str, curve: ServingCurve, trace: Sequence[TracedRequest]
) -> dict[str, float]:
    """The simulator's, by the engine's own limits and curve."""
    run = run_trace(trace, engine.limits, CurvePrice(curve), FAIR_POLICIES[policy])
    served = [each.traced for each in run.requests]
    return summary(
        served, [each.first_s for each in run.requests], [each.end_s for each in run.requests]
    )


def summary(
    trace: Sequence[TracedRequest], firsts: Sequence[float], lasts: Sequence[float]
) -> dict[str, float]:
    """Means over requests, and tokens over the whole time."""
    rows = list(zip(trace, firsts, lasts, strict=True))
    tokens = sum(each.output_tokens for each in trace)
    return {
        "ttft_s": statistics.mean(first - each.arrival_s for each, first, _ in rows),
        "tpot_s": statistics.mean(
            (last - first) / (each.output_tokens - 1) for each, first, last in rows
        ),
        "tokens_per_s": tokens / max(lasts),
    }


def kept(model: ModelSpec, threads: int, ranks: int) -> ServingCurve | None:
    """The curve that the engine has kept; None if other programs used the cores meanwhile."""
    wanted = serving_name(model), DTYPE, threads, ranks
    for each in read_serving(serving_file()):
        if (each.model, each.dtype, each.threads, each.ranks) == wanted:
            return each.curve
    return None


def side(name: str, requests: int) -> dict[str, Any]:
    """One setting: every trace, measured and simulated."""
    setting = PLANS[name]
    torch.set_num_threads(setting.threads)
    trained = open_model(smollm2())
    more = {"cache_bytes": 1 << 29, **setting.more}
    settings = EngineSettings(dtype=DTYPE, **more)
    rows = {}
    for _ in range(TRIES):
        with open_engine(open_model(smollm2()), settings):
            curve = kept(trained.model, setting.threads, settings.context_ranks)
        if curve is not None:
            break
    else:
        raise SystemExit("Other programs use the cores: no engine could measure its curve.")
    with open_engine(trained, settings) as engine:
        serve(engine, "warm", draw_trace("chat", 2))
        for trace_name in TRACES:
            stamp, trace = LoadStamp(), draw_trace(trace_name, requests)
            measured = serve(engine, trace_name, trace)
            rows[trace_name] = {
                "measured": measured,
                "simulated": simulate(engine, settings.policy, curve, trace),
                "other_load_cores": round(stamp.other_load(), 2),
            }
    return rows


def tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau.

    >>> tau([1, 2, 3], [10, 30, 20])
    0.3333333333333333
    """
    pairs = list(combinations(range(len(one)), 2))
    signs = [np.sign(one[a] - one[b]) * np.sign(other[a] - other[b]) for a, b in pairs]
    return float(sum(signs)) / len(pairs)


def compare(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Errors by metric, and how alike both sides order the settings."""
    errors = {
        metric: {
            f"{plan}; {trace}": row["simulated"][metric] / row["measured"][metric] - 1
            for plan, traces in rows.items()
            for trace, row in traces.items()
        }
        for metric in METRICS
    }
    taus = {
        trace: {
            metric: tau(
                [rows[plan][trace]["measured"][metric] for plan in rows],
                [rows[plan][trace]["simulated"][metric] for plan in rows],
            )
            for metric in METRICS
        }
        for trace in TRACES
    }
    return {
        "mean absolute error": {
            metric: statistics.mean(map(abs, each.values())) for metric, each in errors.items()
        },
        "worst": {
            metric: max(each.items(), key=lambda pair: abs(pair[1]))
            for metric, each in errors.items()
        },
        "by trace": {
            trace: {
                metric: statistics.mean(abs(errors[metric][f"{plan}; {trace}"]) for plan in rows)
                for metric in METRICS
            }
            for trace in TRACES
        },
        "tau": taus,
        "mean tau": {
            metric: statistics.mean(each[metric] for each in taus.values()) for metric in METRICS
        },
    }


def measure(requests: int) -> dict[str, Any]:
    """Every setting in a process of its own."""
    rows, failed = {}, []
    for name in PLANS:
        command = [sys.executable, "-m", "bench.serving.plans", name, str(requests)]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            failed.append(name)
        else:
            rows[name] = json.loads(done.stdout)
    return {
        "goals": GOALS,
        **compare(rows),
        "failed": failed,
        "rows": rows,
        "environment": environment(),
    }


if __name__ == "__main__":
    match sys.argv[1:]:
        case [plan, count]:
            answer = side(plan, int(count))
        case words:
            answer = measure(TINY if words == ["tiny"] else sys.maxsize)
    json.dump(answer, sys.stdout, indent=1)
