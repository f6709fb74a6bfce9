"""How long an iteration may take that several tenants share.

Why
    The limit, which ``turns.py`` explains, takes several prices for each tenant, and most
    iterations are far below it.

What it decides
    The limit is found only where something depends on it.

Kept true (tests/unit/schedule/batching/test_turns.py, by Hypothesis)
    What is found without the limit is what the limit says.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from equipoise.schedule.batching.sequence import Sequence
from equipoise.schedule.batching.settings import LEAST_WEIGHT, BatchSettings, ServingPrice
from equipoise.spec.serving import decodes_of

DECODE_TIMES = 3
"""Prompts may make an iteration this many times as long as its decodes alone. Where a machine is
slow, less would leave hardly any time for prompts, and those who wait for them would not decode."""

TIMES = 2.0
"""What others may do to the time of a tenant's tokens, if its share allows no more."""

_PACE = 0.5
"""Iterations up to this part of ``iteration_s`` are never too long: on fast devices prompts would
wait long for what makes no difference to those who read."""


class TenantRows(NamedTuple):
    """The decodes of one tenant."""

    tenant: str
    weight: float
    rows: int
    context_tokens: int
    prompt_tokens: int
    """Tokens of prompts that could be computed beside them."""


class IterationLimit:
    """The decodes of all tenants that have any, and up to where their iteration may be filled."""

    __slots__ = (
        "_context_tokens",
        "_groups",
        "_has_prompts",
        "_here",
        "_limit_s",
        "_pace_s",
        "_price",
        "_prompts",
        "_rows",
        "_settings",
        "_sizes",
    )

    def __init__(
        self,
        settings: BatchSettings,
        price: ServingPrice,
        sizes: Mapping[str, tuple[int, int]],
        here: Mapping[str, int] | None = None,
        prefilling: Iterable[Sequence] = (),
    ) -> None:
        """Note what waits at this moment.

        Args:
            settings: The tenants' weights, and the time of an iteration.
            price: Of iterations.
            sizes: How many sequences of each tenant decode, and the context that their tokens read.
            here: How many requests each tenant has here, whatever their state; None where no
                prompt could be computed.
            prefilling: Sequences with pages whose prompts are computed.
        """
        self._settings, self._price, self._sizes = settings, price, sizes
        self._has_prompts = here is not None
        self._here = here or {}
        self._prompts: dict[str, int] = {}
        """Tokens of each tenant's prompts that have pages and are not computed."""
        for each in prefilling:
            tenant = each.request.tenant
            left = self._prompts.get(tenant, 0) + each.known - each.computed
            self._prompts[tenant] = left
        self._rows = self._context_tokens = 0
        for rows, context_tokens in sizes.values():
            self._rows += rows
            self._context_tokens += context_tokens
        self._pace_s = pace_s(settings)
        self._groups: list[TenantRows] | None = None
        self._limit_s: float | None = None

    @property
    def all_s(self) -> float:
        """What all decodes take together [s]."""
        return self._decodes_s(self._rows, self._context_tokens)

    @property
    def groups(self) -> list[TenantRows]:
        """The decodes by tenant."""
        if self._groups is None:
            self._groups = [self._group(tenant, *size) for tenant, size in self._sizes.items()]
        return self._groups

    @property
    def seconds(self) -> float:
        """The limit [s]."""
        if self._limit_s is None:
            self._limit_s = self._seconds()
        return self._limit_s

    @property
    def rows_s(self) -> float:
        """Up to where decodes fill the iteration: prompts beside them have what is left [s]."""
        limit_s = self.seconds
        if not self._has_prompts:
            return limit_s
        own = [self._decodes_s(each.rows, each.context_tokens) for each in self.groups]
        own_s = min(own)
        least = self.groups[own.index(own_s)]
        page_s = self._page_s(least.rows, least.context_tokens) - own_s
        return max(own_s, min((limit_s + own_s) / 2, limit_s - page_s))

    def holds(self, seconds: float) -> bool:
        """Whether an iteration of this length is within the limit."""
        return seconds <= self._pace_s or seconds <= self.seconds

    def holds_all(self) -> bool:
        """Whether all decodes fit the time that is theirs."""
        return self._is_short() or self.all_s <= self.rows_s

    def others_s(self, group: TenantRows) -> float:
        """What the decodes of all other tenants take [s]."""
        return self._decodes_s(self._rows - group.rows, self._context_tokens - group.context_tokens)

    def _is_short(self) -> bool:
        """Whether all decodes fit even the shortest limit there is.

        Prices rise with every size: all decodes with a page of a prompt take longer than without,
        and longer than the decodes of one tenant with a page.
        """
        if not self._has_prompts:
            return self.all_s <= self._pace_s
        return self._page_s(self._rows, self._context_tokens) <= self._pace_s / 2

    def _seconds(self) -> float:
        groups = self.groups
        weight = sum(each.weight for each in groups)
        prompt_tokens = sum(each.prompt_tokens for each in groups)
        limit_s = math.inf
        # Without the most prompts the others' time is the shortest.
        for each in sorted(groups, key=lambda each: each.prompt_tokens, reverse=True):
            if len(groups) > 1:
                others_s = self._alone_s(
                    self._rows - each.rows,
                    self._context_tokens - each.context_tokens,
                    prompt_tokens - each.prompt_tokens,
                )
                share = weight / max(weight - each.weight, LEAST_WEIGHT)
                limit_s = min(limit_s, max(TIMES, share) * others_s)
            if limit_s > self._pace_s:
                own_s = self._alone_s(each.rows, each.context_tokens, each.prompt_tokens)
                limit_s = min(limit_s, max(TIMES, weight / each.weight) * own_s)
            if limit_s <= self._pace_s:
                return self._pace_s
        return limit_s

    def _alone_s(self, rows: int, context_tokens: int, prompt_tokens: int) -> float:
        """What an iteration of some tenants would take without the others' [s]."""
        decodes = decodes_of(rows, context_tokens)
        decodes_s = self._price.iteration_s(decodes)
        if not prompt_tokens:
            return decodes_s
        whole_s = self._price.iteration_s(decodes.with_chunk(0, prompt_tokens, 1))
        if whole_s <= TIMES * decodes_s:  # they have room within the decodes' own limit
            return decodes_s
        return min(max(self._settings.iteration_s, DECODE_TIMES * decodes_s), whole_s)

    def _decodes_s(self, rows: int, context_tokens: int) -> float:
        return self._price.iteration_s(decodes_of(rows, context_tokens))

    def _page_s(self, rows: int, context_tokens: int) -> float:
        """Some decodes, and a page of a prompt beside them [s]."""
        page = self._settings.page_tokens
        return self._price.iteration_s(decodes_of(rows, context_tokens).with_chunk(0, page, 0))

    def _group(self, tenant: str, rows: int, context_tokens: int) -> TenantRows:
        prompt_tokens = self._prompts.get(tenant, 0)
        waiting = self._here.get(tenant, 0) - rows
        if waiting > 0:  # they have a page at least
            prompt_tokens = max(prompt_tokens, waiting * self._settings.page_tokens)
        weight = self._settings.weights.get(tenant, 1.0)
        return TenantRows(tenant, weight, rows, context_tokens, prompt_tokens)


def pace_s(settings: BatchSettings) -> float:
    """Iterations up to this long are never too long, whoever shares them [s]."""
    return _PACE * settings.iteration_s
