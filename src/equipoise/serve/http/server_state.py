"""What all requests of one server share."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from equipoise.serve.http.answers import MOST_EVENTS
from equipoise.serve.http.limits import Clock, TenantLimits, limits_of
from equipoise.serve.http.metrics import Metrics
from equipoise.serve.http.send import HEARTBEAT_S
from equipoise.serve.http.served import ServedModel
from equipoise.serve.http.tenants import Tenants
from equipoise.serve.loop_share import LoopShare

_LEAST_BODY_BYTES = 4 << 20
_TOKEN_BYTES = 32
"""Bytes of a body for each token of the context: more than any token is long on average."""


@dataclass(slots=True)
class ServerState:
    """One server."""

    model: ServedModel
    tenants: Tenants
    clock: Clock = time.monotonic
    heartbeat_s: float = HEARTBEAT_S
    most_requests: int = 2_048
    """Requests that may be here at a time, whatever they wait for."""
    most_events: int = MOST_EVENTS
    """Events of one request that may wait for its client."""
    log: Callable[[str], None] = lambda _: None
    """Takes a line for every request."""
    is_draining: bool = False
    under_way: int = 0
    """Requests that are here."""
    share: LoopShare = field(default_factory=LoopShare)
    """How often each tenant's requests begin."""
    metrics: Metrics = field(init=False)
    limits: dict[str, TenantLimits] = field(init=False)
    most_body_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.model.engine, self.model.name, self.tenants.by_name)
        engine = self.model.engine.limits
        self.most_body_bytes = max(_LEAST_BODY_BYTES, _TOKEN_BYTES * self.model.context_tokens)
        self.limits = limits_of(
            self.tenants.by_name,
            self.clock,
            running=engine.most_sequences,
            waiting=engine.queued_requests,
            body_bytes=self.most_body_bytes,
        )

    def use(self, limits: TenantLimits, tokens: int) -> None:
        """Tokens of a tenant's answer were generated, and are sent."""
        limits.use(tokens)
        self.share.sent(tokens)

    def refused(self, tenant: str) -> None:
        """A tenant's request was at fault: it is one of its requests a minute all the same."""
        self.limits[tenant].count_refused()
