"""Whose decodes an iteration has where several tenants share it, and how long it may take.

Why
    All rows of an iteration end together. If every row of every tenant were in each, one tenant
    with forty streams would make each token of another, who has one, wait for forty.

What it decides
    An iteration has a limit: for each tenant, its share (the sum of all weights over its own, at
    least twice) of what the tenant's iteration would take if it were alone; and twice of what the
    others' would take without it. The first keeps many tenants from crowding out one, the second
    any one tenant from making the others wait more than twice as long. It is never below half of
    ``iteration_s``: where iterations are that short, nobody's tokens are late. Alone, a tenant
    computes its decodes, and its prompts beside them as far as it would let them; prompts that have
    room beside its decodes within the limit do not raise it. Whoever sent them, prompts fill an
    iteration up to the same limit.

    Where all decodes fit, all run. Where they do not, tenants come in the order of what they ask
    for by their weights. Who asks for no more than the rest could have as well is *within its
    share* and decodes in every iteration; the least does in any case, unless its own prompts wait.
    The rows of the remaining tenants take turns: the tenant that was served least gives the next
    one, which of its rows is the one that waited longest. While prompts wait, decodes leave them
    half of what is above the smallest tenant's own time, and a page of them if that is more.

    At least one of the rows that take turns is in every iteration, and of prompts at least a page:
    an iteration may exceed its limit by so much.

Kept true (tests/unit/schedule/batching/test_turns.py, by Hypothesis)
    A tenant within its share decodes in every iteration; iterations keep their limit; every row
    has its turn within as many iterations as there are rows, where rows are of one size; where
    one tenant is alone, nobody rests.

Sources
    Shares by work over weight: start-time fair queueing, SIGCOMM 1996. Max-min fair shares:
    Bertsekas and Gallager, Data Networks, section 6.5.2.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from equipoise.schedule.batching.decodes import Decodes
from equipoise.schedule.batching.limit import TIMES, IterationLimit, TenantRows, pace_s
from equipoise.schedule.batching.sequence import Sequence
from equipoise.schedule.batching.settings import BatchSettings, ServingPrice, single_s
from equipoise.spec.serving import IterationWork, decodes_of


class DecodeTurn(NamedTuple):
    """Whose turn it is."""

    limit: IterationLimit | None = None
    """Up to where the iteration may be filled; None where one tenant has it to itself."""
    rested: tuple[str, ...] = ()
    """Requests that decoded, and do not now."""
    resumed: tuple[str, ...] = ()
    """Requests that did not decode, and do now."""

    def then(self, later: "DecodeTurn") -> "DecodeTurn":
        """Both for the same iteration: the later one's limit, and all who rest or go on."""
        if not (self.rested or self.resumed):
            return later
        return DecodeTurn(later.limit, self.rested + later.rested, self.resumed + later.resumed)


class TenantTurns:
    """Puts decodes to rest, and lets them go on."""

    def __init__(
        self,
        settings: BatchSettings,
        price: ServingPrice,
        decodes: Decodes,
        prefilling: Mapping[str, Sequence],
        *,
        divides_by_tenant: bool,
    ) -> None:
        """Begin with nobody served.

        Args:
            settings: The tenants' weights, and the time of an iteration.
            price: Of iterations.
            decodes: All decodes of a scheduler.
            prefilling: Sequences with pages whose prompts are computed.
            divides_by_tenant: Whether tenants have shares; else all decodes always run.
        """
        self._settings, self._price = settings, price
        self._decodes, self._prefilling = decodes, prefilling
        self._divides = divides_by_tenant
        self._pace_s = pace_s(settings)
        self._tags: dict[str, float] = {}
        """Work over weight of the tenants whose rows take turns [s]."""
        self._turn = 0

    def begin(self, sequence: Sequence) -> None:
        """A sequence begins to decode: its turn comes after those that wait already."""
        self._turn += 1
        sequence.turn = self._turn

    def next(self, here: Mapping[str, int], *, has_prompts: bool) -> DecodeTurn:
        """Choose the decodes of the next iteration.

        Args:
            here: How many requests each tenant has here, whatever their state.
            has_prompts: Whether any prompt could be computed in the iteration.
        """
        decodes = self._decodes
        if not self._divides or len(here) < 2:
            return DecodeTurn(resumed=self._resume(list(decodes.resting.values())))
        if not (has_prompts or decodes.resting) and self._is_short(1):
            return DecodeTurn()
        sizes = decodes.of_tenants()
        if not sizes or not (has_prompts or decodes.resting or not self._fit(sizes, 1)):
            return DecodeTurn()
        if has_prompts:
            prefilling = self._prefilling.values()
            limit = IterationLimit(self._settings, self._price, sizes, here, prefilling)
        else:
            limit = IterationLimit(self._settings, self._price, sizes)
        if limit.holds_all():
            self._tags.clear()
            return DecodeTurn(limit, (), self._resume(list(decodes.resting.values())))
        return self._divide(limit)

    def repeats(self, most: int) -> int:
        """Iterations in a row, at most as many, of all of which ``next`` would say the same."""
        decodes = self._decodes
        if not self._divides or most == 1:
            return most
        if decodes.resting:
            return 1
        if self._is_short(most):
            return most
        sizes = decodes.of_tenants()
        while most > 1 and not self._fit(sizes, most):
            most //= 2
        return most

    def _is_short(self, iterations: int) -> bool:
        """Whether all that do not rest take no longer than nobody minds, in each of as many."""
        last = self._decodes.work().after(iterations - 1)
        return self._price.iteration_s(last) <= self._pace_s

    def _fit(self, sizes: Mapping[str, tuple[int, int]], iterations: int) -> bool:
        """Whether all decodes surely fit the limit, in each of as many iterations.

        Prices rise with every size: the last iteration must fit the limit of the first.
        """
        if len(sizes) < 2:
            return True
        last_s = self._price.iteration_s(_whole(sizes).after(iterations - 1))
        rows = min(rows for rows, _ in sizes.values())
        context_tokens = min(context for _, context in sizes.values())
        if last_s <= TIMES * self._price.iteration_s(decodes_of(rows, context_tokens)):
            return True
        return last_s <= IterationLimit(self._settings, self._price, sizes).seconds

    def _divide(self, limit: IterationLimit) -> DecodeTurn:
        """Let those within their share decode, and the others take turns."""
        limit_s, rows_s, rows = limit.seconds, limit.rows_s, self._rows()
        demands = {
            each.tenant: (limit.all_s - limit.others_s(each)) / each.weight for each in limit.groups
        }
        groups = sorted(limit.groups, key=lambda each: (demands[each.tenant], each.tenant))
        taken = decodes_of(0, 0)
        taken_s = single_s(self._price)
        left_weight = sum(each.weight for each in groups)
        chosen: list[Sequence] = []
        beyond: list[TenantRows] = []
        for each in groups:
            more = _plus(taken, each.rows, each.context_tokens)
            more_s = self._price.iteration_s(more)
            spare_s = (rows_s if each.prompt_tokens else limit_s) - more_s
            others_weight = left_weight - each.weight
            others_s = max(0.0, more_s - taken_s) * others_weight / each.weight
            is_least = each is groups[0] and not each.prompt_tokens
            if is_least or spare_s >= others_s:
                chosen += rows[each.tenant]
                taken, taken_s, left_weight = more, more_s, others_weight
            else:
                beyond.append(each)
        chosen += self._take_turns(beyond, rows, taken, rows_s)
        names = {each.request.id for each in chosen}
        rested = [
            each
            for group in beyond
            for each in rows[group.tenant]
            if each.request.id not in names and each.request.id not in self._decodes.resting
        ]
        for sequence in rested:
            self._decodes.rest(sequence)
        waited = [each for each in chosen if each.request.id in self._decodes.resting]
        return DecodeTurn(limit, _names(rested), self._resume(waited))

    def _take_turns(
        self,
        groups: Iterable[TenantRows],
        rows: Mapping[str, list[Sequence]],
        taken: IterationWork,
        rows_s: float,
    ) -> list[Sequence]:
        """Fill an iteration up to a time; a first row is taken in any case."""
        weights = {each.tenant: each.weight for each in groups}
        known = [self._tags[tenant] for tenant in weights if tenant in self._tags]
        begin = min(known, default=0.0)
        tags = {tenant: self._tags.get(tenant, begin) for tenant in weights}
        waiting = {
            tenant: deque(sorted(rows[tenant], key=lambda each: each.turn)) for tenant in weights
        }
        order = [(tag, tenant) for tenant, tag in tags.items()]
        heapify(order)
        chosen: list[Sequence] = []
        ended: list[str] = []
        reached = begin
        while order:
            tag, tenant = heappop(order)
            row = waiting[tenant][0]
            more = _plus(taken, 1, row.known)
            if chosen and self._price.iteration_s(more) > rows_s:
                continue
            waiting[tenant].popleft()
            taken, reached = more, tag
            self.begin(row)
            chosen.append(row)
            tags[tenant] = tag + self._price.output_s(row.known - 1, 1) / weights[tenant]
            if waiting[tenant]:
                heappush(order, (tags[tenant], tenant))
            else:
                ended.append(tenant)
        for tenant in ended:  # what a tenant did not ask for, it is not owed
            tags[tenant] = max(tags[tenant], reached)
        self._tags = tags
        return chosen

    def _rows(self) -> dict[str, list[Sequence]]:
        rows: dict[str, list[Sequence]] = {}
        for each in (*self._decodes.sequences(), *self._decodes.resting.values()):
            rows.setdefault(each.request.tenant, []).append(each)
        return rows

    def _resume(self, sequences: list[Sequence]) -> tuple[str, ...]:
        for each in sequences:
            self._decodes.resume(each)
        return _names(sequences)


def _names(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    return tuple(each.request.id for each in sequences)


def _plus(work: IterationWork, rows: int, context_tokens: int) -> IterationWork:
    return decodes_of(work.sequences + rows, work.kv_tokens + context_tokens)


def _whole(sizes: Mapping[str, tuple[int, int]]) -> IterationWork:
    """All decodes of these tenants."""
    rows = context_tokens = 0
    for each_rows, each_tokens in sizes.values():
        rows += each_rows
        context_tokens += each_tokens
    return decodes_of(rows, context_tokens)
