"""Serving over two ranks: prefill against one core, and the choice of what moves against the best.

Sides, interleaved round by round, on two layers of SmolLM2-135M's sizes in fp32:
    one process, one thread         the engine without ranks
    one process, two threads        likewise; what the two cores do without ranks
    two ranks, one thread each      ``ContextDecoder``, whole prompts and chunks of them

Efficiency in processor time is that of the rank that computes longest: what is left when nobody
waits, neither for a link nor for a core that something else uses.

The sweep computes T new tokens of 2,048 behind a cache of the rest, by each way of moving things,
in attention over all layers. Regret is what the chosen way takes longer than the best one. Which
way is best is what half of the rounds say, and the seconds of both are those of the other half;
then the halves change places. Where one half does both, the best is whichever was lucky, and the
regret of a choice that is right is above 0. It runs at the machine's own loopback and at one that
``tc tbf`` slows in a network namespace.
"""

import dataclasses
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.balance.context.continued import plan_continued
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
SWEEP_ROUNDS = 8
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
        ways, same = tell_apart(start, new)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for at in range(-1, SWEEP_ROUNDS):  # the first warms up
            for name in ways[at % len(ways) :] + ways[: at % len(ways)]:
                two.choice = VariantChoice(MODEL, choice.price, choice.wire, (name,))
                compute(two, start, new, new)
                if at >= 0:
                    taken[name].append(two.peers.part().attention_s)
        medians = {name: statistics.median(times) for name, times in taken.items()}
        chosen = choice.choose([(start // 2, start // 2)], [new])
        halves = by_halves(taken, same[chosen])
        rows[f"{rate:.1%}"] = {
            "new tokens": new,
            "measured_s": {name: round(each, 5) for name, each in medians.items()},
            "chosen": chosen,
            "best": [half["best"] for half in halves],
            "regret": round(statistics.mean(half["regret"] for half in halves), 4),
        }
    two.choice = choice
    regrets = [row["regret"] for row in rows.values()]
    return {
        "price": dataclasses.asdict(choice.price),
        "by miss rate": rows,
        "mean regret": round(float(np.mean(regrets)), 4),
        "worst regret": max(regrets),
    }


def tell_apart(start: int, new: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """The ways that differ for these sizes, and which of them each way is.

    >>> tell_apart(1844, 204)[1]["gather-q"]  # of two ranks, each has one to send queries to
    'pass-q'
    """
    known: dict[tuple[object, ...], str] = {}
    same: dict[str, str] = {}
    for name in VARIANTS:
        cached = [(start // 2, start // 2)]
        plan = plan_continued(cached, [new], name, heads=MODEL.heads, kv_heads=MODEL.kv_heads)
        moves = tuple(
            (rank, at, own.tiles.tobytes(), repr(own.sends), repr(own.receives))
            for rank, at, own in plan.schedule
        )
        same[name] = known.setdefault(moves, name)
    return tuple(known.values()), same


def by_halves(taken: Mapping[str, Sequence[float]], chosen: str) -> list[dict[str, Any]]:
    """The best way by one half of the rounds, and what the chosen one takes longer in the other.

    >>> by_halves({"ring": [1.0, 3.0, 1.0, 3.0], "pass-q": [2.0, 2.0, 2.0, 2.0]}, "ring")
    [{'best': 'ring', 'regret': 0.0}, {'best': 'pass-q', 'regret': -0.5}]
    """
    halves = list[dict[str, Any]]()
    for judge in range(2):
        judged_s = {name: statistics.median(times[judge::2]) for name, times in taken.items()}
        scored_s = {name: statistics.median(times[1 - judge :: 2]) for name, times in taken.items()}
        best = min(judged_s, key=lambda name: judged_s[name])
        halves.append({"best": best, "regret": scored_s[chosen] / scored_s[best] - 1})
    return halves


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
        "what": "two ranks of one thread each; prompts of 8,192 tokens, medians of 2 rounds; "
        "regret of 8 rounds, the best way of one half scored by the other",
        "goals": GOALS,
        "networks": {rate or "loopback": in_network(rate) for rate in RATES},
        "environment": environment(),
    }


if __name__ == "__main__":
    told = sys.argv[1:]
    json.dump(side(is_whole=told == ["whole"]) if told else measure(), sys.stdout, indent=1)
