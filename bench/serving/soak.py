"""A server at twice its capacity: ``python -m bench.serving.soak [SECONDS]``.

Clients that wait for each other find how many requests a second the server can answer. Then
requests come at twice that rate, at random times, whether it is ready or not: completions,
conversations, embeddings, several answers, streams, and some clients that leave. Every request
must be answered, or refused with a Retry-After; memory must not grow; and what the metrics have
counted must be what the usages say.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.lib.server import Answer, Json, ServerProcess, ask, request_bytes
from bench.lib.stamp import environment

GOALS = {"lost": 0, "memory, MiB a minute": "about 0", "metrics less usages": 0}
CAPACITY_S, CLIENTS = 30.0, 32
LOAD = 2.0
LEAVE = 0.05
"""Share of clients that go away."""
MIB = 1 << 20


def drawn(source: random.Random) -> tuple[str, Json]:
    """A request: path and body."""
    ids = [source.randrange(100, 40_000) for _ in range(source.choice([16, 64, 64, 200]))]
    kind = source.random()
    if kind < 0.15:
        return "/v1/embeddings", {"input": [ids, ids[:9]]}
    if kind < 0.3:
        talk = [{"role": "user", "content": f"Say {source.randrange(1000)}."}]
        return "/v1/chat/completions", {"messages": talk, "max_tokens": 16}
    body: Json = {"prompt": ids, "max_tokens": source.choice([4, 16, 32])}
    if kind < 0.4:
        body |= {"n": 3}
    elif kind < 0.5:
        body |= {"logprobs": 2, "echo": True}
    elif kind < 0.8:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return "/v1/completions", body


@dataclass
class Seen:
    """What became of all requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    faults: list[str] = field(default_factory=list)

    def take(self, answer: Answer) -> None:
        """Count an answer."""
        self.statuses[str(answer.status)] += 1
        if answer.status in (429, 503):
            if "retry-after" not in answer.headers:
                self.faults.append(f"{answer.status} without Retry-After")
            return
        usage = usage_of(answer) if answer.status == 200 else None
        if usage is None:
            self.faults.append(f"{answer.status}: {answer.body[-200:]!r}")
            return
        self.prompt_tokens += usage["prompt_tokens"]
        self.completion_tokens += usage.get("completion_tokens", 0)


def usage_of(answer: Answer) -> Json | None:
    """What a whole answer, or a stream's last event, counts; None if it ended before."""
    if not answer.body.startswith(b"data: ") and not answer.body.startswith(b": "):
        whole: Json = answer.json["usage"]
        return whole
    events = answer.body.split(b"\n\n")
    if events[-2:] != [b"data: [DONE]", b""]:
        return None
    last: Json = json.loads(events[-3].removeprefix(b"data: "))
    return last.get("usage")


async def find_capacity(server: ServerProcess, seconds: float, seen: Seen) -> float:
    """Requests a second that waiting clients get answered, once all memory was touched."""
    start_s = time.perf_counter()
    ends_s = []

    async def client(number: int) -> None:
        source = random.Random(number)
        while time.perf_counter() < start_s + 2 * seconds:
            answer = await ask(server.port, *drawn(source), server.keys["all"])
            seen.take(answer)
            if answer.status == 200:
                ends_s.append(time.perf_counter() - start_s)

    await asyncio.gather(*map(client, range(CLIENTS)))
    return sum(seconds <= end_s < 2 * seconds for end_s in ends_s) / seconds


async def leave(server: ServerProcess, source: random.Random) -> None:
    """Ask, and go away."""
    path, body = drawn(source)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request_bytes(path, body, server.keys["all"]))
    await asyncio.sleep(source.uniform(0.0, 0.5))
    writer.transport.abort()


async def overload(server: ServerProcess, rate: float, seconds: float, seen: Seen) -> int:
    """Requests at random times, whatever the server does; how many of their clients left."""
    source = random.Random(7)
    begin_s, at_s, left = time.perf_counter(), 0.0, 0
    tasks: set[asyncio.Task[None]] = set()

    async def one(path: str, body: Json) -> None:
        seen.take(await ask(server.port, path, body, server.keys["all"]))

    while at_s < seconds:
        at_s += source.expovariate(rate)
        await asyncio.sleep(max(0.0, begin_s + at_s - time.perf_counter()))
        leaves = source.random() < LEAVE
        left += leaves
        task = asyncio.create_task(leave(server, source) if leaves else one(*drawn(source)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    while tasks:
        await asyncio.wait(set(tasks))
    return left


@asynccontextmanager
async def memory_of(server: ServerProcess) -> AsyncIterator[list[tuple[float, float]]]:
    """(seconds, MiB) while the block runs."""
    points: list[tuple[float, float]] = []

    async def watch() -> None:
        begin_s = time.perf_counter()
        while True:
            points.append((time.perf_counter() - begin_s, server.memory_bytes() / MIB))
            await asyncio.sleep(1.0)

    task = asyncio.create_task(watch())
    try:
        yield points
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def slope(points: list[tuple[float, float]]) -> float:
    """MiB a minute over the second half, in which buffers have their size."""
    late = np.array([each for each in points if each[0] >= points[-1][0] / 2])
    if len(late) < 2:
        return float("nan")
    return float(np.polyfit(late[:, 0], late[:, 1], 1)[0] * 60)


async def measure(seconds: float) -> dict[str, Any]:
    """All of it."""
    seen = Seen()
    with ServerProcess(["all"], "--dtype", "bf16", "--kv-tokens", "32768") as server:
        rate = await find_capacity(server, min(CAPACITY_S, seconds), seen)
        before = seen.statuses["200"]
        begin_s = time.perf_counter()
        async with memory_of(server) as points:
            left = await overload(server, LOAD * rate, seconds, seen)
        answered_rate = (seen.statuses["200"] - before) / (time.perf_counter() - begin_s)
        for _ in range(100):
            said = await asyncio.to_thread(server.metrics)
            if not said["equipoise_requests_running"] + said["equipoise_requests_waiting"]:
                break
            await asyncio.sleep(0.1)
        answered = said["equipoise_generation_tokens_total"]
        ended = said["equipoise_request_success_total"]
        return {
            "what": f"requests at {LOAD:g} times what the server answers, for {seconds:g} s",
            "goals": GOALS,
            "capacity, requests a second": rate,
            "answered under that load, requests a second": answered_rate,
            "requests by status": dict(seen.statuses),
            "clients that left": left,
            "lost": seen.statuses["0"] + len(seen.faults),
            "faults": seen.faults[:5],
            "memory, MiB": [points[0][1], points[-1][1]],
            "memory after each minute, MiB": [round(mib) for _, mib in points[60::60]],
            "memory, MiB a minute": slope(points),
            "generated tokens: metrics less usages": answered
            - said["equipoise_unanswered_tokens_total"]
            - seen.completion_tokens,
            "prompt tokens: metrics less usages (those of clients that left)": said[
                "equipoise_prompt_tokens_total"
            ]
            - seen.prompt_tokens,
            "answers: histogram less counter": said["equipoise_e2e_request_latency_seconds_count"]
            - ended,
            "pages held at the end": said["equipoise_kv_cache_usage_ratio"],
            "is alive": server.exit_code is None,
            "environment": environment(),
        }


if __name__ == "__main__":
    json.dump(asyncio.run(measure(float([*sys.argv, "1800"][1]))), sys.stdout, indent=1)
