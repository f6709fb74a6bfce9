"""Run the application on a socket until a signal stops it, and let what it began end.

What it decides
    The first Ctrl-C or SIGTERM drains: new requests get 503, those under way go on. The second
    stops at once. A connection that sends no whole head within 30 s is closed, after its first
    request, too.

Kept true (tests/unit/serve/http/test_operations.py, tests/unit/cli/test_serve.py)
    A drained server has answered every request that it took.
"""

import asyncio
import socket
import threading
import uuid
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from equipoise.base.errors import SpecError
from equipoise.serve.http.app import GateState
from equipoise.serve.http.fault import HttpError
from equipoise.serve.http.send import encode
from equipoise.serve.side import leave_cores

_HEAD_S = 30.0
_UNREAD_MS = 60_000
"""The kernel closes a connection whose client leaves data unread for this long."""
_UNREAD_BYTES = 128 << 10
"""What the kernel keeps for a client that does not read; by default it keeps megabytes."""
_AHEAD_BYTES = 64 << 10
"""What is read of further requests while one is answered: who reads nothing sees no end either."""
_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address; clients are refused until a server runs on it.

    Raises:
        SpecError: the port is taken, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, UnicodeError, TypeError) as error:  # the last of a name that no host can have
        listener.close()
        raise _taken(host, port, error) from None
    except OverflowError:
        listener.close()
        raise SpecError(f"--port must be from 0 to 65535; it is {port}.") from None
    listener.setblocking(False)
    return listener


def _taken(host: str, port: int, error: Exception) -> SpecError:
    why = (getattr(error, "strerror", None) or "no such host").lower()
    return SpecError(
        f"Cannot listen on {host}:{port}: {why}. Give another --port (0 takes any free one) or "
        "--host."
    )


class _Protocol(H11Protocol):
    """uvicorn's, with limits of time, OpenAI's shape, and a way to drop a connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "transport": transport}
        peer = transport.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        # asyncio does it only for sockets that were made with TCP's number. Without it the end of
        # an answer waits for the client to acknowledge its head: up to 40 ms.
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _USER_TIMEOUT is not None:
            peer.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, _UNREAD_MS)
        self._waits = self.loop.call_later(_HEAD_S, self._give_up)
        self._ahead_bytes = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._waits.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        is_ahead = self.conn.their_state is h11.DONE
        super().data_received(data)
        self._ahead_bytes = self._ahead_bytes + len(data) if is_ahead else 0
        if self.cycle is not None and not self.cycle.response_complete:
            self._waits.cancel()
            if self.conn.their_state is h11.DONE and self._ahead_bytes <= _AHEAD_BYTES:
                self.flow.resume_reading()
        elif self._waits.cancelled():  # a further request on this connection has begun
            self._waits = self.loop.call_later(_HEAD_S, self._give_up)

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP gets an answer in OpenAI's shape, too."""
        self._refuse(HttpError(400, msg, code="invalid_http"))

    def _give_up(self) -> None:
        self._refuse(HttpError(408, "No request arrived.", code="request_timeout"))

    def _refuse(self, fault: HttpError) -> None:
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            data = encode(fault.body)
            head = h11.Response(
                status_code=fault.status,
                headers=[
                    (b"content-type", b"application/json"),
                    (b"content-length", str(len(data)).encode()),
                    (b"connection", b"close"),
                    (b"x-request-id", f"req-{uuid.uuid4().hex}".encode()),
                ],
            )
            for event in (head, h11.Data(data=data), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Server(uvicorn.Server):
    """Serves until it is stopped."""

    def __init__(
        self, app: ASGIApp, state: GateState, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        """Make a server.

        Args:
            app: Answers, behind a gate.
            state: Shared by all requests, and by the gate.
            on_ready: Called once clients can connect.
        """
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)
        self._state, self._on_ready = state, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen.

        Raises:
            SpecError: another server has begun to at the same address since ``listen``.
        """
        if self._state.share is not None:
            leave_cores()
        try:
            await super().startup(sockets)
        except OSError as error:
            host, port, *_ = sockets[0].getsockname() if sockets else ("", 0)
            raise _taken(host, port, error) from None
        self._on_ready()

    def drain(self) -> None:
        """Take no further request; stop once none is under way."""
        self._state.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop."""
        if self._state.is_draining and not self._state.under_way:
            return True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """A signal: drain; at the second, stop."""
        if self._state.is_draining:
            self.should_exit = self.force_exit = True
        self.drain()


class ServerThread:
    """A server on a thread of its own: ``with ServerThread(app, state) as server``."""

    def __init__(
        self, app: ASGIApp, state: GateState, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._ready = threading.Event()
        self._server = Server(app, state, self._ready.set)
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])

    def drain(self) -> None:
        """As a signal does."""
        self._server.drain()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False if it took too long."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> "ServerThread":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
