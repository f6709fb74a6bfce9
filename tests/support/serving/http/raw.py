"""HTTP by hand, for what no client sends."""

import http.client
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


def open_socket(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=240)


def read_reply(raw: socket.socket) -> Reply:
    """The next reply; nothing behind it is read."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = raw.recv(1)
        if not byte:
            raise ConnectionError(f"The server closed the connection after {head!r}")
        head += byte
    lines = head.decode("latin-1").split("\r\n")
    headers = {
        name.lower(): text.strip()
        for name, _, text in (line.partition(":") for line in lines[1:] if line)
    }
    body = b""
    size = int(headers.get("content-length", "0"))
    while len(body) < size:
        body += raw.recv(size - len(body))
    return Reply(int(lines[0].split()[1]), headers, body)


def ask(
    port: int,
    method: str,
    path: str,
    data: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    try:
        given = {"Content-Type": "application/json", **(headers or {})}
        connection.request(method, path, data or None, given)
        reply = connection.getresponse()
        fields = {name.lower(): text for name, text in reply.getheaders()}
        return Reply(reply.status, fields, reply.read())
    finally:
        connection.close()
