"""The ASGI application: routes, and the gate that every request passes.

What it decides
    Each request has an id, a tenant, a time to be answered by if it says so, and an answer in
    OpenAI's shape, whatever goes wrong. All routes need a key but those that a load balancer asks:
    ``/health``, ``/ready``, ``/version``.

Kept true (tests/unit/serve/http/test_gate.py)
    No route answers strangers; no failure is a page of HTML or a traceback.
"""

import asyncio
import math
import re
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from equipoise.base.errors import FitError, ModelError, SpecError
from equipoise.base.shown import shorten
from equipoise.serve.http.asked import refusal
from equipoise.serve.http.endpoints import Endpoints
from equipoise.serve.http.fault import HttpError, failed, overloaded, retry_headers
from equipoise.serve.http.keys import find_tenant
from equipoise.serve.http.send import ClientGoneError, drop, send_json
from equipoise.serve.http.server_state import ServerState
from equipoise.serve.http.tenants import OPEN, Tenants
from equipoise.serve.loop_share import MOST_WAIT_S, LoopShare

_OPEN_PATHS = ("/health", "/ready", "/version")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TIMEOUT = "X-Request-Timeout"
_AT_FAULT = (400, 404, 413, 415)
"""Answers to what a tenant should not have sent: these are requests of its allowance, too."""
_STRANGERS = ""
"""Who has no key that is known, together."""
_CLOSED = 499
"""As nginx logs a client that went away."""


def make_app(state: ServerState) -> ASGIApp:
    """The application of one server."""
    ends = Endpoints(state)
    router = Router(
        [
            Route(path, Endpoint(answer), methods=[method])
            for method, path, answer in (
                ("POST", "/v1/completions", ends.completions),
                ("POST", "/v1/chat/completions", ends.chat),
                ("POST", "/v1/embeddings", ends.embeddings),
                ("GET", "/v1/models", ends.models),
                ("GET", "/v1/models/{name:path}", ends.model_card),
                ("POST", "/tokenize", ends.tokenize),
                ("POST", "/detokenize", ends.detokenize),
                ("GET", "/health", ends.health),
                ("GET", "/ready", ends.health),
                ("GET", "/version", ends.version),
                ("GET", "/metrics", ends.metrics),
            )
        ],
        redirect_slashes=False,
    )
    return Gate(state, router)


class Endpoint:
    """An endpoint as an ASGI application."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._answer(Request(scope, receive), send)


class Refusals(Protocol):
    """Counts requests that were not taken."""

    def count_refusal(self, reason: str) -> None:
        """Count one."""


class GateState(Protocol):
    """What the gate shares with what is behind it."""

    is_draining: bool
    under_way: int
    """Requests that are here."""

    @property
    def tenants(self) -> Tenants:
        """Who may ask."""

    @property
    def most_requests(self) -> int:
        """Requests that may be here at a time."""

    @property
    def metrics(self) -> Refusals:
        """Where refusals are counted."""

    @property
    def share(self) -> LoopShare | None:
        """How often each tenant's requests begin; None where nothing competes with reading them."""

    def refused(self, tenant: str) -> None:
        """A tenant's request was at fault."""

    @property
    def log(self) -> Callable[[str], None]:
        """Takes a line for every request."""


class Gate:
    """Lets requests in, and turns whatever happens into an answer."""

    def __init__(self, state: GateState, inner: ASGIApp) -> None:
        self._state, self._inner = state, inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope["path"] = _origin_form(scope["path"])
        name = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(name):
            name = f"req-{uuid.uuid4().hex}"
        answer = _Answer(send, name)
        began_s = time.monotonic()
        scope["app"] = self  # the router then raises what it refuses
        state: dict[str, Any] = scope.setdefault("state", {})
        state["name"], state["held"] = name, ExitStack()
        self._state.under_way += 1
        try:
            await self._pass(scope, receive, answer.send, headers)
        except ClientGoneError as error:
            answer.status = _CLOSED
            if str(error):
                self._state.log(f"Gave up {name}. {error}")
            drop(Request(scope))
        except HttpError as fault:
            is_at_fault = fault.status in _AT_FAULT and scope["method"] == "POST"
            if is_at_fault and "tenant" in state:
                self._state.refused(state["tenant"])
            await self._refuse(answer, fault)
        except (SpecError, FitError, ModelError) as error:
            await self._refuse(answer, refusal(error))
        except HTTPException as error:  # from the router: 404 and 405
            await self._refuse(answer, _routing_fault(scope, error))
        except Exception:
            sys.stderr.write(traceback.format_exc())
            await self._refuse(answer, failed())
        finally:
            state["held"].close()
            self._state.under_way -= 1
            self._state.log(
                f"{scope['method']} {shorten(scope['path'], 100)} {answer.status} "
                f"{state.get('tenant', '-')} {time.monotonic() - began_s:.3f}s {name}"
            )

    async def _pass(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        state = self._state
        _require_one_length(scope, headers)
        scope["state"]["until_s"] = _until_s(headers)
        is_open_path = scope["path"] in _OPEN_PATHS
        if not is_open_path:
            await self._enter(scope, headers)
        if scope["method"] == "POST":
            if state.is_draining:
                state.metrics.count_refusal("draining")
                raise overloaded("The server is shutting down. Ask another one.", 5.0)
            if state.under_way > state.most_requests:
                state.metrics.count_refusal("connections")
                raise overloaded(f"{state.most_requests:,} requests are under way already.", 1.0)
        await self._inner(scope, receive, send)

    async def _enter(self, scope: Scope, headers: Headers) -> None:
        """Find out whose request it is, and let it wait for its turn.

        Raises:
            HttpError: 401 if nobody's; 429 if others' would have to wait for too many of its
                tenant's.
        """
        share, state = self._state.share, scope["state"]
        try:
            state["tenant"] = tenant = self._find_tenant(headers)
        except HttpError:
            await self._wait(share, _STRANGERS, state["held"])
            raise
        await self._wait(share, tenant, state["held"])

    async def _wait(self, share: LoopShare | None, tenant: str, held: ExitStack) -> None:
        if share is None:
            return
        wait_s = share.arrive(tenant)
        held.callback(share.leave, tenant)
        if wait_s > MOST_WAIT_S:
            self._state.metrics.count_refusal("rate_limit")
            await asyncio.sleep(share.refuse(tenant))
            raise HttpError(
                429,
                f"{tenant or 'Who has no key'} sends more requests than can be read beside those "
                f"of others. Try again in {math.ceil(wait_s)} s.",
                kind="rate_limit_exceeded",
                code="rate_limit_exceeded",
                headers=retry_headers(wait_s),
            )
        if wait_s:
            await asyncio.sleep(wait_s)
        share.begin(tenant)

    def _find_tenant(self, headers: Headers) -> str:
        tenants = self._state.tenants
        if tenants.is_open:
            return OPEN
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip()
        tenant = find_tenant(key, tenants.by_hash) if scheme.lower() == "bearer" and key else None
        if tenant is None:
            self._state.metrics.count_refusal("key")
            words = (
                "The API key is not known."
                if key
                else "There is no API key. Send one as Authorization: Bearer KEY."
            )
            raise HttpError(
                401, words, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        return tenant.name

    async def _refuse(self, answer: "_Answer", fault: HttpError) -> None:
        if not answer.has_begun:
            await send_json(answer.send, fault.body, status=fault.status, headers=fault.headers)


class _Answer:
    """Adds the request's id to an answer, and notes its status."""

    def __init__(self, send: Send, name: str) -> None:
        self._send, self._name = send, name
        self.status, self.has_begun = 500, False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.has_begun = message["status"], True
            message["headers"].append((b"x-request-id", self._name.encode("ascii")))
        await self._send(message)


def _require_one_length(scope: Scope, headers: Headers) -> None:
    """Refuse a body whose end another server may see elsewhere, and all that follows it.

    RFC 9112, section 6.1: what stands behind that end is then taken for a request of its own.
    """
    if "transfer-encoding" not in headers:
        return
    if "content-length" in headers:
        words = "A request has Transfer-Encoding or Content-Length, not both. Leave one out."
    elif scope["http_version"] == "1.0":
        words = "HTTP/1.0 has no Transfer-Encoding. Send Content-Length, or HTTP/1.1."
    else:
        return
    raise HttpError(400, words, code="invalid_http", headers={"Connection": "close"})


def _origin_form(target: str) -> str:
    """The path of a request's target, which may be a whole address: RFC 9112, section 3.2.2.

    >>> _origin_form("/v1/models"), _origin_form("http://a:8000/v1/models"), _origin_form("http://a")
    ('/v1/models', '/v1/models', '/')
    """
    if not target.startswith(("http://", "https://")):
        return target
    return "/" + "".join(target.split("/", 3)[3:])


def _until_s(headers: Headers) -> float | None:
    """When the client wants its whole answer by, on the monotonic clock [s]; None if any time."""
    said = headers.get(_TIMEOUT)
    if said is None:
        return None
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        words = f'{_TIMEOUT} must be a number of seconds above 0; it is "{shorten(said)}".'
        raise HttpError(400, words, code="invalid_value")
    return time.monotonic() + seconds


def _routing_fault(scope: Scope, error: HTTPException) -> HttpError:
    path = shorten(scope["path"], 100)
    if error.status_code == 405:
        return HttpError(
            405,
            f"{scope['method']} is not possible at {path}. Allowed: "
            f"{(error.headers or {}).get('Allow', '')}.",
            code="method_not_allowed",
            headers=error.headers,
        )
    return HttpError(404, f"There is nothing at {path}.", code="not_found")
