"""``POST /v1/rank`` and what stands beside it, behind the gate of every server.

What it decides
    A request has what its candidates share, and for each other column a list with a value for each
    candidate. The answer has the candidates in order, best first, each with its place in the
    request::

        {"context": {"user_id": 196, "age": 49},
         "candidates": {"item_id": [242, 302], "genres": [["Comedy"], ["Crime", "Mystery"]]}}

        {"object": "ranking", "model": "ml-100k",
         "results": [{"index": 1, "score": 0.71, "logit": 0.89}, ...],
         "usage": {"candidates": 2, "unknown_values": 0}}

Kept true (tests/unit/serve/ranking/test_server.py)
    Logits are those of the run's evaluation to the bit; whatever the body, the answer is a 4xx in
    OpenAI's shape, and the next request is answered.
"""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.requests import Request
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Send

from equipoise.serve.http.app import Endpoint, Gate
from equipoise.serve.http.body import SHORT_BYTES, read_body
from equipoise.serve.http.endpoints import AboutModel
from equipoise.serve.http.fault import HttpError, failed, overloaded
from equipoise.serve.http.limits import HeldBodies
from equipoise.serve.http.send import encode_long, send_bytes, send_json, while_connected
from equipoise.serve.http.tenants import Tenants, open_tenants
from equipoise.serve.ranking.batcher import Batcher, RankedRequest
from equipoise.serve.ranking.metrics import RankMetrics

_MOST_CANDIDATES = 65_536
_MOST_BODY_BYTES = 64 << 20
_MOST_UNDER_WAY_BYTES = 8 * _MOST_BODY_BYTES
"""Bytes of all bodies under way, as far as they have arrived."""
_FEW = 1_024
"""Candidates that are put in order and written at once; more must not hold others up."""
_REASONS = {400: "invalid", 503: "queue_full", 500: "failed"}
"""Why a request that was read has no ranking, by its answer's status."""


class RankBody(BaseModel):
    """``POST /v1/rank``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    context: dict[str, Any] = Field(default_factory=dict)
    candidates: dict[str, list[Any]]
    top: Annotated[int, Field(ge=1)] | None = None

    @field_validator("candidates", mode="after")
    @classmethod
    def _judge_candidates(cls, given: dict[str, list[Any]]) -> dict[str, list[Any]]:
        most = max(map(len, given.values()), default=0)
        if not most:
            raise ValueError("must have a column with a value for each candidate.")
        if most > _MOST_CANDIDATES:
            raise ValueError(f"may be {_MOST_CANDIDATES:,} at most; there are {most:,}.")
        return given


@dataclass(slots=True)
class RankState:
    """What all requests of one server share."""

    batcher: Batcher
    tenants: Tenants = field(default_factory=open_tenants)
    log: Callable[[str], None] = lambda _: None
    most_requests: int = 2_048
    is_draining: bool = False
    under_way: int = 0
    bodies: HeldBodies = field(default_factory=lambda: HeldBodies(_MOST_UNDER_WAY_BYTES))
    share: None = None
    """Requests cost the event loop little beside what they compute: none has to wait."""
    metrics: RankMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = RankMetrics(self.batcher)

    def refused(self, tenant: str) -> None:
        """A request was at fault; nobody's are limited here."""


class RankEndpoints(AboutModel):
    """What a ranking server answers."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state.batcher.model, state.metrics.write)
        self.state, self.model = state, state.batcher.model

    async def rank(self, request: Request, send: Send) -> None:
        """``POST /v1/rank``."""
        began, size = time.perf_counter(), 0
        held = request.scope["state"]["held"]

        def hold(part: int) -> None:
            nonlocal size
            self._hold(part, held)
            size += part

        body = await self._read(request, hold)
        answer = self._answer(send, body, began, is_long=size > SHORT_BYTES)
        await while_connected(request.receive, answer)

    def _hold(self, size: int, held: ExitStack) -> None:
        """Keep further bytes of a body.

        Raises:
            HttpError: 503 if there are too many.
        """
        bodies = self.state.bodies
        if not bodies.hold(size, held):
            self.state.metrics.count_refusal("queue_full")
            raise overloaded(
                f"Requests of {bodies.size_bytes:,} bytes are under way already "
                f"({bodies.most_bytes:,} at most).",
                1.0,
            )

    async def _read(self, request: Request, hold: Callable[[int], None]) -> RankBody:
        try:
            body = await read_body(request, RankBody, _MOST_BODY_BYTES, hold)
            if body.model is not None:
                self._require_model(body.model)
        except HttpError as fault:
            if fault.status != 503:
                self.state.metrics.count_refusal("invalid")
            raise
        return body

    async def _answer(self, send: Send, body: RankBody, began: float, *, is_long: bool) -> None:
        given = body.context, body.candidates
        try:
            scored = await self.state.batcher.score(*given, is_long=is_long)
            write = partial(self._write, scored, body.top)
            is_long = len(scored.logits) > _FEW
            data = await asyncio.to_thread(write) if is_long else write()
        except HttpError as fault:
            self.state.metrics.count_refusal(_REASONS[fault.status])
            raise
        taken_s = time.perf_counter() - began
        self.state.metrics.count_answer(taken_s, len(scored.logits), scored.unknown)
        await send_bytes(send, data, "application/json")

    def _write(self, scored: RankedRequest, top: int | None) -> bytes:
        """The candidates in order, best first, as JSON."""
        logits = scored.logits
        if not all(map(math.isfinite, logits)):
            raise failed("The model's scores are not numbers. Serve an earlier checkpoint.")
        order = sorted(range(len(logits)), key=lambda at: (-logits[at], at))[:top]
        answer = {
            "object": "ranking",
            "model": self.model.name,
            "results": [
                {"index": at, "score": _chance(logits[at]), "logit": logits[at]} for at in order
            ],
            "usage": {"candidates": len(logits), "unknown_values": scored.unknown},
        }
        return encode_long(answer)

    async def health(self, request: Request, send: Send) -> None:  # noqa: ARG002
        """``GET /health``: whether this server answers, and how fast it did."""
        if self.state.is_draining:
            raise overloaded("The server is shutting down.", 1.0)
        metrics = self.state.metrics
        middle, high = metrics.quantile_s(0.5), metrics.quantile_s(0.99)
        facts = {"status": "ok", "requests": metrics.requests, "p50_s": middle, "p99_s": high}
        await send_json(send, facts)

    def _own_facts(self) -> dict[str, Any]:
        return {"columns": list(self.model.columns)}


def make_rank_app(state: RankState) -> ASGIApp:
    """The application of one server."""
    ends = RankEndpoints(state)
    routes = (
        ("POST", "/v1/rank", ends.rank),
        ("GET", "/v1/models", ends.models),
        ("GET", "/v1/models/{name:path}", ends.model_card),
        ("GET", "/health", ends.health),
        ("GET", "/ready", ends.health),
        ("GET", "/version", ends.version),
        ("GET", "/metrics", ends.metrics),
    )
    router = Router(
        [Route(path, Endpoint(answer), methods=[method]) for method, path, answer in routes],
        redirect_slashes=False,
    )
    return Gate(state, router)


def _chance(logit: float) -> float:
    """The probability of a logit."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    grown = math.exp(logit)
    return grown / (1 + grown)
