"""Hostile clients, in a process of their own: ``python -m bench.serving.attacks NAME PORT KEY``.

They say a line once they attack, and go on until they are stopped. What honest clients measure is
then the server's time, and not that of building four megabytes of rubbish on their own thread.
"""

import asyncio
import contextlib
import random
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from bench.lib.server import ask, request_bytes

STREAMS, PROMPT, OUT = 4, 48, 64
LONG = 8000
COMPLETIONS = "/v1/completions"

Attack = Callable[[int, str, random.Random], Awaitable[None]]


def prompt(source: random.Random, tokens: int) -> list[int]:
    """Tokens that no other prompt begins with."""
    return [source.randrange(100, 40_000) for _ in range(tokens)]


def streamed(source: random.Random) -> dict[str, Any]:
    """What an honest client asks."""
    return {
        "prompt": prompt(source, PROMPT),
        "max_tokens": OUT,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }


async def flood(port: int, key: str, source: random.Random) -> None:
    """A long prompt, scored."""
    body = {"prompt": prompt(source, LONG), "max_tokens": 1, "echo": True, "logprobs": 20}
    await ask(port, COMPLETIONS, body, key)


async def leave(port: int, key: str, source: random.Random) -> None:
    """Ask, and go away."""
    body = {
        "prompt": prompt(source, source.choice([8, 400, 2000])),
        "max_tokens": 500,
        "n": source.choice([1, 4]),
        "stream": source.random() < 0.5,
    }
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request_bytes(COMPLETIONS, body, key))
        await asyncio.sleep(source.uniform(0.0, 0.2))
    finally:  # also when the phase ends
        writer.transport.abort()


async def read_nothing(port: int, key: str, source: random.Random) -> None:
    """Ask for much, and read none of it."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(raw, ("127.0.0.1", port))
        body = streamed(source) | {"max_tokens": 2000, "n": 4, "logprobs": 20, "temperature": 1}
        await loop.sock_sendall(raw, request_bytes(COMPLETIONS, body, key))
        await asyncio.sleep(60)
    finally:
        raw.close()


@cache
def rubbish(key: str) -> list[bytes]:
    """Bodies and heads that are wrong, made once."""
    large = b'{"prompt": "' + b"word " * 800_000 + b'"}'
    return [
        request_bytes(COMPLETIONS, large, key),
        request_bytes(COMPLETIONS, b"[" * 1_000_000, key),
        request_bytes(COMPLETIONS, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, key),
        request_bytes(COMPLETIONS, {"prompt": 5, "temperature": "hot"}, key),
        request_bytes(COMPLETIONS, {"prompt": "a" * 3000}, key)[:-200],
        request_bytes(COMPLETIONS, b" " * (32 << 20), key),
        b"\x16\x03\x01\x02\x00" * 20 + b"\r\n\r\n",
    ]


async def send_rubbish(port: int, key: str, source: random.Random) -> None:
    """One body or head that is wrong."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(source.choice(rubbish(key)))
        async with asyncio.timeout(5):
            await writer.drain()
            await reader.read(1 << 16)
    finally:
        writer.transport.abort()


async def like_honest(port: int, key: str, source: random.Random) -> None:
    """An honest request of the other tenant."""
    await ask(port, COMPLETIONS, streamed(source), key)


ATTACKS: dict[str, tuple[Attack, int]] = {
    "log-probabilities": (flood, 2),
    "disconnects": (leave, 16),
    "slow readers": (read_nothing, 16),
    "malformed": (send_rubbish, 8),
    "ten to one": (like_honest, 10 * STREAMS),
}


async def again(client: Attack, port: int, key: str, source: random.Random) -> None:
    """One hostile client."""
    while True:
        with contextlib.suppress(OSError, TimeoutError):
            await client(port, key, source)


async def attack(name: str, port: int, key: str) -> None:
    """All clients of one attack."""
    client, count = ATTACKS[name]
    source = random.Random(f"{name} {time.time()}")
    tasks = [asyncio.create_task(again(client, port, key, source)) for _ in range(count)]
    print("attacks", flush=True)
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(attack(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
