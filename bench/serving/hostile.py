"""What an honest tenant feels of a hostile one.

``python -m bench.serving.hostile [SECONDS [ROUNDS]]``; 30 and 3 unless given.

A real server of SmolLM2 in bf16. Four honest streams are read all the time; phases of ``SECONDS``
with one attack each, by another process, alternate with phases without, ``ROUNDS`` times:

    log-probabilities   two 8,000-token prompts at a time, echoed with 20 alternatives a token
    disconnects         sixteen clients that leave, streaming or not, 0 to 200 ms after they asked
    slow readers        sixteen streams of four answers with log-probabilities that nobody reads
    malformed           4 MB prompts, deep JSON, half bodies, wrong types, what is not HTTP
    ten to one          forty streams like the honest ones

Then the hostile tenant looks for the honest one's prompts in the prefix cache: by what usage says,
and by the time to the first token. The area under the ROC curve is that of a single guess; beside
it stands what the owner of the prompts can tell.
"""

import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from bench.lib.server import ServerProcess, ask
from bench.lib.stamp import LoadStamp, environment
from bench.serving.attacks import ATTACKS, COMPLETIONS, STREAMS, prompt, streamed

GOALS = {"p99 beside an attack over p99 without": 2.0, "timing AUC": 0.55, "cross-tenant hits": 0}
TRIALS, SECRET = 40, 512


async def honest(server: ServerProcess, source: random.Random, gaps_s: list[float]) -> None:
    """One client that streams an answer after the other."""
    while True:
        times_s: list[float] = []
        body, key = streamed(source), server.keys["honest"]
        try:
            answer = await ask(server.port, COMPLETIONS, body, key, times_s)
        finally:
            gaps_s += np.diff(times_s).tolist()
        if answer.status != 200:
            raise RuntimeError(f"an honest request got {answer.status}: {answer.body[:200]!r}")


@contextlib.asynccontextmanager
async def attacked(server: ServerProcess, name: str) -> AsyncIterator[None]:
    """Clients of one attack, in another process."""
    command = "-m", "bench.serving.attacks", name, str(server.port), server.keys["hostile"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        if not await process.stdout.readline():
            raise RuntimeError(f"the attack {name} did not begin")
        yield
    finally:
        process.kill()
        await process.wait()


async def phase(server: ServerProcess, name: str | None, seconds: float) -> list[float]:
    """Gaps between tokens of the honest streams, beside an attack or alone [s]."""
    gaps_s: list[float] = []
    source = random.Random(f"{name} {time.time()}")
    async with attacked(server, name) if name else contextlib.nullcontext():
        tasks = [asyncio.create_task(honest(server, source, gaps_s)) for _ in range(STREAMS)]
        ended, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for each in ended:
        each.result()  # a client that failed says why
    await idle(server)
    return gaps_s


async def idle(server: ServerProcess) -> None:
    """Wait until nobody's request is there any more."""
    for _ in range(600):
        said = await asyncio.to_thread(server.metrics)
        if not said["equipoise_requests_running"] + said["equipoise_requests_waiting"]:
            return
        await asyncio.sleep(0.1)
    raise RuntimeError("the server is not idle a minute after all clients left")


async def beside_attacks(server: ServerProcess, seconds: float, rounds: int) -> dict[str, Any]:
    """Percentiles of every phase."""
    gaps: dict[str, list[float]] = {"": []}
    for _ in range(rounds):
        for name in ATTACKS:
            gaps[""] += await phase(server, None, seconds)
            gaps.setdefault(name, [])
            gaps[name] += await phase(server, name, seconds)
    alone = percentiles(gaps.pop(""))
    return {
        "without": alone,
        **{
            name: (beside := percentiles(each))
            | {"p99 over p99 without": beside["p99_s"] / alone["p99_s"]}
            for name, each in gaps.items()
        },
    }


def percentiles(gaps_s: list[float]) -> dict[str, float]:
    """Median and 99th percentile of the gaps between tokens."""
    if not gaps_s:
        return {"gaps": 0, "p50_s": float("inf"), "p99_s": float("inf")}
    p50, p99 = (float(x) for x in np.percentile(gaps_s, [50, 99]))
    return {"gaps": len(gaps_s), "p50_s": p50, "p99_s": p99}


async def look_for_secrets(server: ServerProcess) -> dict[str, Any]:
    """Times to the first token of prompts that the honest tenant has asked, and of others."""
    source = random.Random(time.time())

    async def first(owner: str, ids: list[int]) -> tuple[float, int]:
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0}
        answer = await ask(server.port, COMPLETIONS, body, server.keys[owner])
        usage = answer.json["usage"]
        return answer.first_s, usage["prompt_tokens_details"]["cached_tokens"]

    rows: dict[str, Any] = {}
    for owner in ("hostile", "honest"):
        known: list[float] = []
        others: list[float] = []
        hits = 0
        for _ in range(TRIALS):
            secret = prompt(source, SECRET)
            await first("honest", secret)
            tries = [(known, secret), (others, prompt(source, SECRET))]
            source.shuffle(tries)
            for times, ids in tries:
                seconds, cached = await first(owner, ids)
                times.append(seconds)
                hits += cached > 0
        rows[owner] = {"trials": TRIALS, "hits": hits, "AUC": auc(known, others)}
    return rows


def auc(known: list[float], others: list[float]) -> float:
    """How often a prompt that was asked before is answered sooner than one that was not."""
    pairs = [*itertools.product(known, others)]
    return sum((a < b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)


async def measure(seconds: float, rounds: int) -> dict[str, Any]:
    """All of it on one server."""
    options = "--dtype", "bf16", "--kv-tokens", "65536"
    with ServerProcess(["honest", "hostile"], *options) as server:
        await phase(server, None, min(seconds, 5.0))
        stamp = LoadStamp()
        rows = await beside_attacks(server, seconds, rounds)
        secrets = await look_for_secrets(server)
        return {
            "what": f"{STREAMS} honest streams; phases of {seconds:g} s, {rounds} rounds",
            "goals": GOALS,
            "gaps between the honest tenant's tokens": rows,
            "another tenant looks for prompts": secrets["hostile"],
            "their owner does": secrets["honest"],
            "is alive": server.exit_code is None,
            "busy cores, the server's included": stamp.other_load(),
            "environment": environment(),
        }


if __name__ == "__main__":
    given = [float(word) for word in sys.argv[1:]]
    numbers = dict(zip(("seconds", "rounds"), given, strict=False))
    run = measure(numbers.get("seconds", 30.0), int(numbers.get("rounds", 3)))
    json.dump(asyncio.run(run), sys.stdout, indent=1)
