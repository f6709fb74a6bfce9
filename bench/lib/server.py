"""A real ``equipoise serve`` in a process of its own, and a client that costs little.

Clients here are raw connections on one event loop: on a machine whose cores the server needs, a
client library would be half of what is measured.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from equipoise.serve.http.keys import hash_key, make_key

Json = dict[str, Any]


class ServerProcess:
    """``with ServerProcess(["ann", "bob"], "--dtype", "bf16") as server``."""

    def __init__(self, tenants: Sequence[str], *options: str) -> None:
        self.keys = {name: make_key() for name in tenants}
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="equipoise-bench-")

    def __enter__(self) -> "ServerProcess":
        file = Path(self._folder.name) / "tenants.toml"
        tables = [
            f'[tenants.{name}]\nkeys = ["{hash_key(key)}"]\n' for name, key in self.keys.items()
        ]
        file.write_text("\n".join(tables))
        command = [sys.executable, "-m", "equipoise.cli.main", "serve", "--port", "0", "--json"]
        self._process = subprocess.Popen(
            [*command, "--tenants", str(file), *self._options], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        said = ""
        while not said.endswith("}\n"):
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError("the server did not start")
            said += line
        self.facts: Json = json.loads(said)
        self.port = int(self.facts["url"].rpartition(":")[2].partition("/")[0])
        self.pid = self._process.pid
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._folder.cleanup()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def memory_bytes(self) -> int:
        """What of its memory is resident."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        resident = next(line for line in lines if line.startswith("VmRSS:"))
        return int(resident.split()[1]) << 10

    def metrics(self) -> dict[str, float]:
        """Sums over the labels of each name."""
        import urllib.request

        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/metrics",
            headers={"Authorization": f"Bearer {next(iter(self.keys.values()))}"},
        )
        sums: dict[str, float] = {}
        with urllib.request.urlopen(request, timeout=60) as answer:
            for line in answer.read().decode().splitlines():
                if line and not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    name = name.partition("{")[0]
                    sums[name] = sums.get(name, 0.0) + float(value)
        return sums


@dataclass(slots=True)
class Answer:
    """What came back."""

    status: int
    """0 if the connection ended without one."""
    headers: Mapping[str, str]
    body: bytes = b""
    times_s: list[float] = field(default_factory=list)
    """When each event of a stream came."""
    began_s: float = 0.0

    @property
    def json(self) -> Json:
        """The body as JSON."""
        value: Json = json.loads(self.body)
        return value

    @property
    def first_s(self) -> float:
        """From the request to the first event, or to the whole answer."""
        return self.times_s[0] - self.began_s


def request_bytes(path: str, body: Json | bytes, key: str) -> bytes:
    """A request that closes its connection."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    ).encode() + data


async def ask(
    port: int, path: str, body: Json | bytes, key: str, times_s: list[float] | None = None
) -> Answer:
    """Ask, and read all of the answer; ``times_s`` grows while it comes."""
    began_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        writer.write(request_bytes(path, body, key))
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): text.strip() for name, _, text in (each.partition(":") for each in head)
        }
        times_s = [] if times_s is None else times_s
        answer = Answer(int(head[0].split()[1]), headers, times_s=times_s, began_s=began_s)
        if "content-length" in headers:
            answer.body = await reader.readexactly(int(headers["content-length"]))
            answer.times_s.append(time.perf_counter())
            return answer
        parts = [part async for part in _chunks(reader, answer.times_s)]
        answer.body = b"".join(parts)
        return answer
    except (OSError, asyncio.IncompleteReadError):
        return Answer(0, {}, began_s=began_s)
    finally:
        writer.transport.abort()


async def _chunks(reader: asyncio.StreamReader, times_s: list[float]) -> AsyncIterator[bytes]:
    while size := int(await reader.readline(), 16):
        data = await reader.readexactly(size + 2)
        if data.startswith(b"data: {"):
            times_s.append(time.perf_counter())
        yield data[:-2]
    await reader.readline()
