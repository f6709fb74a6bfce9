"""Serving over two ranks: prefill against one core, and the choice of what moves against the best.

Sides, interleaved round by round, on two layers of SmolLM2-135M's sizes in fp32:
    one process, one thread         the engine without ranks
    one process, two threads        likewise; what the two cores do without ranks
    two ranks, one thread each      ``ContextDecoder``, whole prompts and chunks of them

Efficiency in processor time is that of the rank that computes longest: what is left when nobody
waits, neither for a link nor for a core that something else uses.

The sweep computes T new tokens of 2,048 behind a cache of the rest, by each way of moving things;
regret is what the chosen way takes longer than the fastest, in attention over all layers. It runs
at the machine's own loopback and at one that ``tc tbf`` slows in a network namespace.
"""

import dataclasses
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.balance.context.variant import VARIANTS
from equipoise.nn.decoder import Decoder, initialize
from equipoise.schedule.batching.iteration import PageRun, ServeChunk
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.pool import KvPool
from equipoise.serve.longctx.choice import VariantChoice
from equipoise.serve.longctx.decoder import ContextDecoder
from equipoise.spec.model.presets import ModelSpec

MODEL = ModelSpec(
    layers=2, hidden=576, heads=9, kv_heads=3, ffn=1536, vocab=1024, head_width=64, tied=True
)
PROMPT, CHUNK, ROUNDS = 8192, 1024, 2
TOTAL = 2048
MISS_RATES = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
RATES = (None, "1gbit")
GOALS = {"efficiency": 0.93, "regret": 0.005}
PAGE = 16


def built() -> Decoder:
    """Random weights."""
    decoder = Decoder(MODEL)
    initialize(decoder, 1)
    return decoder.requires_grad_(False)


def compute(engine: PagedDecoder, start: int, tokens: int, chunk: int) -> None:
    """Tokens [start, start + tokens) of one sequence, in chunks."""
    for begin in range(start, start + tokens, chunk):
        count = min(chunk, start + tokens - begin)
        runs = (PageRun(0, -(-(begin + count) // PAGE)),)
        ids = [at * at % MODEL.vocab for at in range(begin, begin + count)]
        engine.run([ServeChunk("", begin, count, runs, samples=True, logits=1)], ids)


def seconds(call: Callable[[], None]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def prefill(decoder: Decoder, two: ContextDecoder) -> dict[str, Any]:
    """Seconds of a prompt on every side."""
    pool = KvPool(
        MODEL,
        pages=PROMPT // PAGE,
        page_tokens=PAGE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    one = PagedDecoder(decoder, pool)
    taken: dict[str, list[float]] = {}
    cores: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for chunk in (PROMPT, CHUNK):
            for name, engine, threads in (
                ("one process, one thread", one, 1),
                ("one process, two threads", one, 2),
                ("two ranks", two, 1),
            ):
                torch.set_num_threads(threads)
                key = f"{name}, chunks of {chunk}"
                before = [each["core_s"] for each in two.peers.counts()]
                taken.setdefault(key, []).append(
                    seconds(lambda e=engine, c=chunk: compute(e, 0, PROMPT, c))  # type: ignore[misc]
                )
                after = [each["core_s"] for each in two.peers.counts()]
                spent = [end - begin for begin, end in zip(before, after, strict=True)]
                cores.setdefault(key, []).append(max(spent))
    torch.set_num_threads(1)
    rows: dict[str, Any] = {name: spread(times) for name, times in taken.items()}
    for chunk in (PROMPT, CHUNK):
        alone, both, ranks = (
            statistics.median(taken[f"{name}, chunks of {chunk}"])
            for name in ("one process, one thread", "one process, two threads", "two ranks")
        )
        rows[f"chunks of {chunk}"] = {
            "efficiency against one core": round(alone / ranks / 2, 3),
            "speedup over one process on both cores": round(both / ranks, 3),
            "efficiency in processor time": round(
                min(cores[f"one process, one thread, chunks of {chunk}"])
                / min(cores[f"two ranks, chunks of {chunk}"])
                / 2,
                3,
            ),
        }
    return rows


def sweep(two: ContextDecoder) -> dict[str, Any]:
    """Attention seconds of every way, and of the chosen one, by miss rate."""
    choice, rows = two.choice, {}
    compute(two, 0, TOTAL, TOTAL)
    for rate in MISS_RATES:
        new = max(1, round(rate * TOTAL / 2) * 2)
        start = TOTAL - new
        taken: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for _ in range(ROUNDS + 1):
            for name in VARIANTS:
                two.choice = VariantChoice(MODEL, choice.price, choice.wire, (name,))
                compute(two, start, new, new)
                taken[name].append(two.peers.part().attention_s)
        medians = {name: statistics.median(times) for name, times in taken.items()}
        chosen = choice.choose([(start // 2, start // 2)], [new])
        rows[f"{rate:.1%}"] = {
            "new tokens": new,
            "measured_s": {name: round(each, 5) for name, each in medians.items()},
            "chosen": chosen,
            "fastest": min(medians, key=lambda name: medians[name]),
            "regret": round(medians[chosen] / min(medians.values()) - 1, 4),
        }
    two.choice = choice
    regrets = [row["regret"] for row in rows.values()]
    return {
        "price": dataclasses.asdict(choice.price),
        "by miss rate": rows,
        "mean regret": round(float(np.mean(regrets)), 4),
        "worst regret": max(regrets),
    }


def side(*, is_whole: bool) -> dict[str, Any]:
    """What is measured in one network."""
    torch.set_num_threads(1)
    decoder, stamp = built(), LoadStamp()
    begin_s = time.perf_counter()
    two = ContextDecoder(decoder, ranks=2, pages=PROMPT // PAGE)
    start_s = time.perf_counter() - begin_s
    try:
        rows = {
            "start_s": round(start_s, 2),
            "calibrate_s": round(seconds(lambda: two.measure() and None), 2),
            "sweep": sweep(two),
        }
        if is_whole:
            rows["prefill"] = prefill(decoder, two)
            rows["pool bytes of each rank"] = [each["pool"] for each in two.peers.counts()]
        rows["other_load_cores"] = round(stamp.other_load(two.peers.counts()[1]["core_s"]), 2)
    finally:
        two.close()
    return rows


def in_network(rate: str | None) -> dict[str, Any]:
    """The same in a process of its own, over a loopback of this rate."""
    command = [sys.executable, "-m", "bench.serving.context", "whole" if rate is None else "sweep"]
    if rate is not None:
        words = (
            f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate} burst 256kb "
            f"latency 200ms && exec {shlex.join(command)}"
        )
        command = ["unshare", "-n", "sh", "-c", words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        return {"not measured": done.stderr.strip().splitlines()[-1:]}
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def measure() -> dict[str, Any]:
    """Every network."""
    return {
        "what": "two ranks of one thread each; prompts of 8,192 tokens, medians of 2 rounds",
        "goals": GOALS,
        "networks": {rate or "loopback": in_network(rate) for rate in RATES},
        "environment": environment(),
    }


if __name__ == "__main__":
    told = sys.argv[1:]
    json.dump(side(is_whole=told == ["whole"]) if told else measure(), sys.stdout, indent=1)
