"""How often each tenant's requests begin: none may keep the event loop from the others.

Why
    Head and body of a request are read on the one thread that also sends everybody's tokens, and
    that shares the interpreter's lock with the engine's. What is refused costs that thread as much
    as what is answered, and who is refused at once may ask again at once: forty such clients took
    half of a core, and everybody's tokens three times as long.

What it decides
    While requests of several tenants are here, a tenant's requests begin at a distance from each
    other, so that all of them together take no more than its share of a part of the thread's time.
    What one takes is measured: the thread's own time in a quarter of a second, divided by what
    was read and sent in it, and what other threads took to parse long bodies. A few may begin at
    once; one that would wait for long is refused, though not before a second has passed, as long as
    few of its tenant's are here. What refusing takes is its tenant's, and nobody else's requests
    seem dearer for it. A tenant that is alone here never waits.

Kept true (tests/unit/serve/test_loop_share.py, by Hypothesis)
    Beside others no tenant's requests take more than its share and its burst; alone none waits.

Sources
    Distance with a burst: the generic cell rate algorithm, ITU-T I.371.
"""

import time
from collections import Counter, deque
from collections.abc import Callable

_PART = 0.25
"""The part of the thread's time that reading all tenants' requests may take."""
_WINDOW_S = 0.25
_BURST_S = 0.25
"""How far ahead of its distance a tenant's requests may come [s]."""
MOST_WAIT_S = 2.0
"""One that would wait longer is refused [s]."""
_REFUSAL_S = 1.0
"""How long one that is refused is kept: a client that asks again at once costs little then [s]."""
_KEPT = 256
"""Requests of a tenant that are here, up to which those that are refused are kept."""
_BODY_BYTES = 64 << 10
"""This many bytes of a body cost about as much as a head."""
_EVENT = 0.1
"""What sending a token costs, beside reading a head."""


class LoopShare:
    """Requests of tenants, as they arrive at one event loop; called on its thread."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
        refusal_s: float = _REFUSAL_S,
    ) -> None:
        """Begin with no request.

        Args:
            clock: Seconds.
            cpu: What the calling thread has computed [s].
            refusal_s: How long a request that is refused is kept [s].
        """
        self._clock, self._cpu, self._refusal_s = clock, cpu, refusal_s
        self._began: tuple[float, float] | None = None
        """Clock and thread's time when the window began."""
        self._here = Counter[str]()
        self._asked, self._read, self._sent = Counter[str](), Counter[str](), 0
        """In this window: requests and bytes of bodies that were read, and tokens sent."""
        self._refused = Counter[str]()
        """In this window: requests that were refused unread."""
        self._beside_s = deque[tuple[str, float]]()
        """What other threads took for tenants, as it comes [s]."""
        self._costs_s: dict[str, float] = {}
        """What a tenant's request took when it was last measured [s]."""
        self._next_s: dict[str, float] = {}

    def arrive(self, tenant: str) -> float:
        """A request is here: how long it should wait before it is read [s]."""
        now_s = self._clock()
        self._measure(now_s)
        self._here[tenant] += 1
        if len(self._here) < 2:
            return 0.0
        distance_s = self._costs_s.get(tenant, 0.0) * len(self._here) / _PART
        at_s = max(self._next_s.get(tenant, 0.0), now_s - _BURST_S)
        wait_s = max(0.0, at_s - now_s)
        if wait_s <= MOST_WAIT_S:
            self._next_s[tenant] = at_s + distance_s
        return wait_s

    def refuse(self, tenant: str) -> float:
        """A request would wait too long: how long to keep it before it is refused [s]."""
        self._refused[tenant] += 1
        return self._refusal_s if self._here[tenant] <= _KEPT else 0.0

    def begin(self, tenant: str) -> None:
        """A request has waited, and is read now."""
        self._asked[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request is here no longer."""
        self._here[tenant] -= 1
        if not self._here[tenant]:
            del self._here[tenant]

    def read(self, tenant: str, size: int) -> None:
        """Bytes of a body were read."""
        self._read[tenant] += size

    def spent_beside(self, tenant: str, seconds: float) -> None:
        """Another thread has parsed a body for as long; may be called on any thread."""
        self._beside_s.append((tenant, seconds))

    def sent(self, tokens: int) -> None:
        """Tokens were sent."""
        self._sent += tokens

    def _measure(self, now_s: float) -> None:
        """At a window's end, find what the requests in it took."""
        if self._began is None:
            self._began = now_s, self._cpu()
        began_s, cpu_s = self._began
        if now_s - began_s < _WINDOW_S:
            return
        spent_s = self._cpu() - cpu_s
        units = {
            tenant: count + self._read[tenant] / _BODY_BYTES
            for tenant, count in (self._asked + self._refused).items()
        }
        whole = sum(units.values()) + _EVENT * self._sent
        beside_s = dict.fromkeys(self._asked, 0.0)
        while self._beside_s:
            tenant, each_s = self._beside_s.popleft()
            beside_s[tenant] = beside_s.get(tenant, 0.0) + each_s
        for tenant, count in self._asked.items():
            own_s = spent_s * units[tenant] / whole + beside_s.pop(tenant)
            self._costs_s[tenant] = own_s / count
        for tenant, each_s in beside_s.items():  # of requests that began in an earlier window
            self._costs_s[tenant] = max(self._costs_s.get(tenant, 0.0), each_s)
        self._began = now_s, cpu_s + spent_s
        self._asked, self._read, self._refused, self._sent = Counter(), Counter(), Counter(), 0
