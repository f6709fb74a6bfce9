"""Requests a minute, tokens a minute, answers at a time: each tenant's, kept by a clock.

What it decides
    A minute's allowance refills steadily, and no more than one minute's is kept. A request pays
    its prompt when it is taken, and each token of its answers when it comes, so that nobody pays
    for what was not generated; an allowance that an answer has overdrawn must refill before the
    next request. One that comes too soon is refused before its texts are cut into tokens, which
    takes the cores of all; to cut texts alone is a request, too.

    Bodies are kept while their requests are here. Those of a tenant have a bounded size together,
    so that no flood of them fills the memory.

Kept true (tests/unit/serve/http/test_limits.py, by Hypothesis)
    No tenant fills the queue alone. In any span of time a tenant gets at most its allowance of
    that span, one minute's more, and what the answers under way overdraw.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from equipoise.serve.http.fault import HttpError, invalid, retry_headers
from equipoise.serve.http.tenants import Tenant

Clock = Callable[[], float]
_BODIES, _BODIES_BYTES = 4, 256 << 20
"""Largest bodies of each tenant that may be here, and the size of all tenants' if that is more."""


@dataclass(slots=True)
class Bucket:
    """An allowance that refills steadily."""

    per_minute: int
    clock: Clock
    level: float = field(init=False)
    at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.level, self.at_s = float(self.per_minute), self.clock()

    def refill(self) -> float:
        """What is there now; below 0 if it is overdrawn."""
        now_s = self.clock()
        gained = max(0.0, now_s - self.at_s) * self.per_minute / 60
        self.level, self.at_s = min(float(self.per_minute), self.level + gained), now_s
        return self.level

    def wait_s(self, amount: float) -> float:
        """Until this much is there [s]."""
        return max(0.0, (amount - self.refill()) * 60 / self.per_minute)


@dataclass(slots=True)
class HeldBodies:
    """Bodies that are here, as far as they have arrived."""

    most_bytes: int
    """Size of all of them."""
    size_bytes: int = 0

    def hold(self, size: int, held: ExitStack) -> bool:
        """Keep further bytes until ``held`` closes; False if there are too many."""
        if self.size_bytes + size > self.most_bytes:
            return False
        self.size_bytes += size
        held.callback(self._let_go, size)
        return True

    def _let_go(self, size: int) -> None:
        self.size_bytes -= size


class TenantLimits:
    """What one tenant has used."""

    def __init__(
        self,
        tenant: Tenant,
        clock: Clock,
        most_answers: int | None = None,
        most_bytes: int = _BODIES_BYTES,
    ) -> None:
        """Begin with all that a tenant may use.

        Args:
            tenant: Its limits.
            clock: Seconds.
            most_answers: Answers that it may have under way whatever its limits say, so that no
                tenant fills the queue.
            most_bytes: Size of all of its bodies that are here.
        """
        self._bodies = HeldBodies(most_bytes)
        self.tenant = tenant
        bounds = [each for each in (tenant.concurrency, most_answers) if each is not None]
        self.most_answers = min(bounds, default=None)
        """Answers that may be under way at a time; None if nothing bounds them."""
        self._requests, self._tokens = (
            None if each is None else Bucket(each, clock)
            for each in (tenant.requests_per_minute, tenant.tokens_per_minute)
        )
        self.running = 0

    def take(self, prompt_tokens: int, answers: int) -> None:
        """Let a request in.

        Raises:
            HttpError: 429 if it must wait, 400 if it could never run.
        """
        most = self.most_answers
        if most is not None and answers > most:
            raise invalid(
                f"The request asks for {answers:,} answers, and tenant {self.tenant.name} may have "
                f"{most:,} at a time. Ask for fewer.",
                "n",
            )
        if self._tokens is not None and prompt_tokens > self._tokens.per_minute:
            raise self._refuse(
                f"The prompts have {prompt_tokens:,} tokens, and tenant {self.tenant.name} may use "
                f"{self._tokens.per_minute:,} a minute. Shorten them.",
                None,
                "insufficient_quota",
            )
        self._require_place(answers)
        self._require_left(
            (self._requests, 1, "requests"), (self._tokens, max(1, prompt_tokens), "tokens")
        )
        self.running += answers
        if self._requests is not None:
            self._requests.level -= 1
        self.use(prompt_tokens)

    def require_turn(self) -> None:
        """Refuse, before its texts are cut into tokens, a request that comes too soon.

        Raises:
            HttpError: 429: whatever it asks for, it must wait.
        """
        self._require_place(1)
        self._require_left((self._requests, 1, "requests"), (self._tokens, 1, "tokens"))

    def count_request(self) -> None:
        """Let a request in that asks for no answer.

        Raises:
            HttpError: 429 if it must wait.
        """
        self._require_left((self._requests, 1, "requests"))
        if self._requests is not None:
            self._requests.level -= 1

    def count_refused(self) -> None:
        """A request that was read was refused for what it asked: it counts, and overdraws."""
        if self._requests is not None:
            self._requests.level -= 1

    def require_request(self) -> None:
        """Refuse, before it is parsed, a request that comes too soon.

        Raises:
            HttpError: 429 if it must wait.
        """
        self._require_left((self._requests, 1, "requests"))

    def hold(self, size: int, held: ExitStack) -> None:
        """Keep further bytes of a body, until ``held`` closes.

        Raises:
            HttpError: 429 if there are too many.
        """
        bodies = self._bodies
        if not bodies.hold(size, held):
            raise self._refuse(
                f"The requests of tenant {self.tenant.name} that are here have bodies of "
                f"{bodies.size_bytes:,} bytes, and may have {bodies.most_bytes:,}. Wait for one to "
                "end.",
                1.0,
            )

    def _require_place(self, answers: int) -> None:
        most = self.most_answers
        if most is not None and self.running + answers > most:
            raise self._refuse(
                f"Tenant {self.tenant.name} has {self.running:,} answers under way and may have "
                f"{most:,} at a time. Wait for one to end.",
                1.0,
            )

    def _require_left(self, *wanted: tuple[Bucket | None, int, str]) -> None:
        waits = [
            (wait_s, bucket.per_minute, what)
            for bucket, amount, what in wanted
            if bucket is not None and (wait_s := bucket.wait_s(amount)) > 0
        ]
        if waits:
            wait_s, per_minute, what = max(waits)
            raise self._refuse(
                f"Tenant {self.tenant.name} has used its {per_minute:,} {what} a minute. Try again "
                f"in {math.ceil(wait_s)} s.",
                wait_s,
            )

    def use(self, tokens: int) -> None:
        """Tokens were generated."""
        if self._tokens is not None:
            self._tokens.level -= tokens

    def end(self, answers: int) -> None:
        """Answers ended."""
        self.running -= answers

    def give_back(self, prompt_tokens: int, answers: int) -> None:
        """A request that was let in was refused further on."""
        self.running -= answers
        if self._requests is not None:
            self._requests.level += 1
        self.use(-prompt_tokens)

    def headers(self) -> dict[str, str]:
        """What is left, as OpenAI's headers say it."""
        headers: dict[str, str] = {}
        for bucket, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket is not None:
                left = max(0, math.floor(bucket.refill()))
                headers |= {
                    f"x-ratelimit-limit-{what}": str(bucket.per_minute),
                    f"x-ratelimit-remaining-{what}": str(left),
                    f"x-ratelimit-reset-{what}": f"{bucket.wait_s(bucket.per_minute):.3f}s",
                }
        return headers

    def _refuse(
        self, message: str, wait_s: float | None, code: str = "rate_limit_exceeded"
    ) -> HttpError:
        again = {"x-should-retry": "false"} if wait_s is None else retry_headers(wait_s)
        return HttpError(429, message, kind=code, code=code, headers={**self.headers(), **again})


def limits_of(
    tenants: Mapping[str, Tenant],
    clock: Clock = time.monotonic,
    *,
    running: int,
    waiting: int,
    body_bytes: int,
) -> dict[str, TenantLimits]:
    """Limits of every tenant, all unused.

    Args:
        tenants: By name.
        clock: Seconds.
        running: Answers that are computed together.
        waiting: Answers that may wait. Of several tenants each may have its share of them.
        body_bytes: Size of the largest body. Of each tenant a few may be here.
    """
    most_bytes = max(_BODIES * body_bytes, _BODIES_BYTES // len(tenants))
    whole = sum(tenant.weight for tenant in tenants.values())

    def most(tenant: Tenant) -> int | None:
        return None if len(tenants) == 1 else running + int(waiting * tenant.weight / whole)

    return {
        name: TenantLimits(each, clock, most(each), most_bytes) for name, each in tenants.items()
    }
