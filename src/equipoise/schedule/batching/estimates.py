"""How much a request will generate, which nobody knows before it ends."""

import math

from equipoise.schedule.batching.request import ServeRequest

_REMEMBERED = 64
"""Requests over which a tenant's mean runs; earlier ones fade."""


class OutputEstimates:
    """Running mean of what each tenant's requests generated."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[int, float]] = {}

    def expect(self, request: ServeRequest) -> int:
        """Tokens that a request is expected to generate, at most what it may."""
        known = self._means.get(request.tenant)
        if known is None:
            return request.most_tokens
        return min(request.most_tokens, max(1, math.ceil(known[1])))

    def note(self, tenant: str, generated: int) -> None:
        """A request ended by itself."""
        count, mean = self._means.get(tenant, (0, 0.0))
        count = min(count + 1, _REMEMBERED)
        self._means[tenant] = count, mean + (generated - mean) / count
