"""Send answers: at once, or as server-sent events; and notice when the client goes away.

What it decides
    A stream begins before its first token, so that a long prompt does not look like a dead server:
    a comment follows every 15 s without an event. What fails after that is an event with
    ``error``, and the end of the stream.

Kept true (tests/unit/serve/http/test_completions.py, test_operations.py)
    A stream's texts joined are the text that is sent at once. A client that goes away, by FIN or
    RST, streaming or not, ends its answers.

Sources
    Server-sent events: WHATWG HTML, section 9.2. ``data: [DONE]``: OpenAI's API reference.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Send

from equipoise.serve.http.fault import HttpError

HEARTBEAT_S = 15.0
_SLICE = 256
"""Entries of a list that are written at once: with 20 alternatives each, some ms."""
_FEW = 256
"""Scores or tokens that are written at once; more must not hold others up."""
_WRITE_S = 30.0
"""Most seconds that a client may leave one write unread."""


class ClientGoneError(Exception):
    """The client closed the connection; or it does not read, which the message says."""


def encode(value: Any) -> bytes:
    """JSON as UTF-8."""
    # Half of a surrogate pair in a client's own words becomes its JSON escape.
    return _json(value).encode("utf-8", "backslashreplace")


def encode_long(value: Any) -> bytes:
    """The same as ``encode``, in slices between which other threads go on."""
    return _slices(value).encode("utf-8", "backslashreplace")


def _slices(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{" + ",".join(f"{_json(name)}:{_slices(each)}" for name, each in value.items()) + "}"
        )
    if not isinstance(value, list):
        return _json(value)
    if len(value) <= _SLICE or _holds_long(value[0]):
        return "[" + ",".join(map(_slices, value)) + "]"
    slices = (_json(value[at : at + _SLICE])[1:-1] for at in range(0, len(value), _SLICE))
    return "[" + ",".join(slices) + "]"


def _holds_long(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else ()
    return any(isinstance(each, list | tuple) and len(each) > _SLICE for each in inner)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def beside(write: Callable[[], bytes], entries: int) -> bytes:
    """Write this many scores, tokens or numbers; on another thread if they are many."""
    return write() if entries <= _FEW else await asyncio.to_thread(write)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work unless the client goes away first.

    Raises:
        ClientGoneError: it did; the work was cancelled.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working
            raise ClientGoneError
        await working
    finally:
        for each in (working, watching):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError):
                    await each


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def send_json(
    send: Send, value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """A whole answer."""
    await send_bytes(send, encode(value), "application/json", status=status, headers=headers)


async def send_bytes(
    send: Send,
    data: bytes,
    content_type: str,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> None:
    """A whole body."""
    fields = {"content-type": content_type, "content-length": str(len(data)), **(headers or {})}
    await _start(send, status, fields)
    await send({"type": "http.response.body", "body": data})


async def _start(send: Send, status: int, fields: Mapping[str, str]) -> None:
    pairs = [
        (name.lower().encode("latin-1"), text.encode("latin-1")) for name, text in fields.items()
    ]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def send_events(
    send: Send,
    events: AsyncIterator[bytes],
    *,
    headers: Mapping[str, str] | None = None,
    heartbeat_s: float = HEARTBEAT_S,
) -> bool:
    """A stream of events, each as JSON, with ``[DONE]`` at its end; False if it ended in an error.

    Raises:
        ClientGoneError: the client does not read.
    """
    await _start(
        send,
        200,
        {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **(headers or {}),
        },
    )
    is_whole = False
    coming = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            ready, _ = await asyncio.wait((coming,), timeout=heartbeat_s)
            if not ready:
                await _write(send, b": waiting\n\n")
                continue
            event = coming.result()
            if event is None:
                break
            await _write(send, b"data: " + event + b"\n\n")
            coming = asyncio.ensure_future(anext(events, None))
        await _write(send, b"data: [DONE]\n\n")
        is_whole = True
    except HttpError as fault:
        await _write(send, b"data: " + encode(fault.body) + b"\n\n")
    finally:
        coming.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await coming
    await send({"type": "http.response.body", "body": b""})
    return is_whole


async def _write(send: Send, data: bytes) -> None:
    try:
        async with asyncio.timeout(_WRITE_S):
            await send({"type": "http.response.body", "body": data, "more_body": True})
    except TimeoutError:
        raise ClientGoneError(f"Its client read nothing for {_WRITE_S:g} s.") from None


def drop(request: Request) -> None:
    """Close the connection at once, whatever it still holds."""
    transport = request.scope.get("state", {}).get("transport")
    if transport is not None:
        transport.abort()
