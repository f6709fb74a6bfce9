"""ByteScale: hybrid data parallelism, each document on as many ranks as its memory needs.

Why
    Data and context parallelism are one axis of ``dp x cp`` ranks. A long document takes any
    number of them, with equal tokens on each; short ones share a rank, and a document that one
    rank holds sends nothing. Ranks run different numbers of micro-batches.

What it decides
    ``naive``  in order of arrival: each long document its ranks, short ones packed best fit,
               all laid end to end over the ranks. Algorithm 1.
    ``dp``     heaviest first, to the ranks that lag: without a pipeline only the ranks' total
               times have to match. Algorithm 2 with data-parallel balance.
    ``pp``     the same from buckets in turn, a rank staying with one bucket while it has
               documents: micro-batches of one pipeline are then alike, and those of long
               documents are fewer. Algorithm 2 with pipeline balance.
    Activations of a long document may be offloaded to host memory as far as its own compute
    hides the copy; it then needs fewer ranks.

    The paper does not say how many buckets there are or what counts as lagging; here they are 8
    and 2% of a rank's mean work. A micro-batch of short documents ends when it is full or the
    rank has caught up. Under ``pp`` documents on several ranks run before the turns: among
    short ones, each would wait for the last of its ranks.

Kept true (tests/unit/balance/groups/test_bytescale.py, by Hypothesis)
    What every group plan keeps (``balance.groups.plan``); the offloaded bytes take no longer
    than the compute that hides them; a document has the fewest ranks that hold it.

Sources
    ByteScale, arXiv:2502.21231: equation 3 for the ratio, Algorithms 1 and 2.
"""

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from equipoise.balance.groups.cost import GroupCosts
from equipoise.balance.groups.plan import (
    Gang,
    GroupPlan,
    finish_plan,
    make_gang,
)
from equipoise.balance.groups.require import require_fit, require_lengths
from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import SpecError

_BUCKETS = 8
_LAG = 0.02


@dataclass(frozen=True, slots=True)
class Offload:
    """Host memory for the activations of all layers but two, which stay on the device."""

    layers: int
    """Layers of the model, >= 3."""
    bytes_per_token: float
    """Activations of one token in one layer [bytes]."""
    bytes_per_s: float
    """Rate of one rank, the slower of device to host and host to device [bytes/s]."""

    def __post_init__(self) -> None:
        if self.layers < 3:
            raise SpecError(
                f"A model of {self.layers} layers has none to offload: two stay on the device. "
                f"Give 3 or more, or no offload."
            )

    def ratio(self, doc_tokens: Ints, costs: GroupCosts) -> Floats:
        """Largest share of those layers' activations whose copy the compute hides.

        One layer's forward must last as long as the copy of its activations; a document's ranks
        share both equally. The forward is a third of forward and backward.
        """
        layer_s = costs.document_ns(doc_tokens) * 1e-9 / (3 * self.layers)
        left = np.asarray(doc_tokens, dtype=np.float64) * self.bytes_per_token
        share: Floats = np.minimum(1.0, layer_s * self.bytes_per_s / left)
        return share

    def held_tokens(self, doc_tokens: Ints, ratio: Floats) -> Ints:
        """Tokens that would take up as much memory as what stays on the device [tokens].

        >>> Offload(32, 1e5, 1e10).held_tokens(np.array([3200]), np.array([0.5])).tolist()
        [1700]
        """
        kept = 2 + (1 - ratio) * (self.layers - 2)
        held: Ints = np.ceil(np.asarray(doc_tokens) * kept / self.layers - 1e-9).astype(np.int64)
        return held

    def offloaded_bytes(self, doc_tokens: Ints, ratio: Floats) -> Floats:
        """Bytes of each document copied to the host in the forward, and back later [bytes]."""
        moved: Floats = ratio * (self.layers - 2) * np.asarray(doc_tokens) * self.bytes_per_token
        return moved


def plan_bytescale(
    doc_tokens: npt.ArrayLike,
    ranks: int,
    costs: GroupCosts,
    cap_tokens: int,
    *,
    schedule: Literal["naive", "dp", "pp"] = "dp",
    offload: Offload | None = None,
) -> GroupPlan:
    """Put each document on as few ranks as hold it, by ByteScale.

    The first four arguments and the errors are those of ``plan_gangs``. ``schedule`` is the order
    of arrival, or balanced without or with a pipeline; ``offload`` is host memory for documents
    longer than the cap.

    Cost: O(documents x ranks).

    >>> from equipoise.cost.curve import break_even_curve
    >>> plan = plan_bytescale([900, 200, 100], 4, GroupCosts(break_even_curve(10_000)), 400)
    >>> [(gang.ranks, gang.documents) for gang in plan.gangs]
    [((0, 1, 2), (0,)), ((3,), (1,)), ((3,), (2,))]
    """
    began = time.perf_counter()
    lengths = require_lengths(doc_tokens, ranks, cap_tokens)
    ratio, held = np.zeros(len(lengths)), lengths.copy()
    if offload is not None and len(lengths):
        long = lengths > cap_tokens
        ratio[long] = offload.ratio(lengths[long], costs)
        held[long] = offload.held_tokens(lengths[long], ratio[long])
    require_fit(lengths, ranks, ranks, cap_tokens, "bytescale", held=held)
    desk = _Desk(lengths, held, ratio, ranks, costs, cap_tokens)
    if schedule == "naive":
        desk.run_in_order()
    elif len(lengths):
        desk.run_balanced(in_turn=schedule == "pp")
    shares = -(-lengths // desk.width)
    return finish_plan(
        f"bytescale-{schedule}",
        desk.gangs,
        lengths,
        ranks,
        costs,
        cap_tokens,
        largest_share=int(shares.max(initial=0)),
        plan_s=time.perf_counter() - began,
    )


class _Desk:
    """Gangs assigned so far, and when each rank is free."""

    def __init__(
        self, lengths: Ints, held: Ints, ratio: Floats, ranks: int, costs: GroupCosts, cap: int
    ) -> None:
        self.lengths, self.held, self.ratio = lengths, held, ratio
        self.ranks, self.costs, self.cap = ranks, costs, cap
        self.width = -(-held // cap)
        self.alone_ns = costs.document_ns(lengths)
        self.free = np.zeros(ranks, dtype=np.int64)
        self.gangs: list[Gang] = []

    def give(self, chosen: list[int], documents: list[int]) -> None:
        """Assign these documents to these ranks, to run next."""
        gang = make_gang(chosen, documents, self.lengths, self.costs)
        ratio = float(self.ratio[documents[0]])
        if ratio:
            tokens = -(-int(self.held[documents[0]]) // len(chosen))
            gang = replace(gang, tokens_per_rank=tokens, offload=ratio)
        self.gangs.append(gang)
        self.free[chosen] = int(self.free[chosen].max()) + gang.load_ns

    def run_in_order(self) -> None:
        """Algorithm 1: units of whole ranks, laid end to end and around over the ranks."""
        units: list[list[int]] = []
        room: dict[int, int] = {}  # tokens left in each unit of short documents
        for document, tokens in enumerate(self.lengths.tolist()):
            fitting = [(left, unit) for unit, left in room.items() if left >= tokens]
            if self.width[document] > 1 or self.ratio[document] or not fitting:
                if self.width[document] == 1 and not self.ratio[document]:
                    room[len(units)] = self.cap - tokens
                units.append([document])
                continue
            left, chosen = min(fitting)
            units[chosen].append(document)
            room[chosen] = left - tokens
        at = 0
        for unit in units:
            width = int(self.width[unit[0]])
            self.give(sorted((at + step) % self.ranks for step in range(width)), unit)
            at = (at + width) % self.ranks

    def run_balanced(self, *, in_turn: bool) -> None:
        """Algorithm 2: from the first bucket, or from each in turn, to the ranks that lag."""
        buckets = self._buckets()
        slack = _LAG * float(self.alone_ns.sum()) / self.ranks
        bucket_of_rank = np.full(self.ranks, -1)
        turn = 0
        while any(buckets):
            filled = [at for at, bucket in enumerate(buckets) if bucket]
            at = filled[0]
            if in_turn and self.width[buckets[at][0]] == 1:
                at = next((b for b in filled if b >= turn), at)
                turn = at + 1
            bucket, last = buckets[at], int(self.free.max())
            lagging = np.flatnonzero(last - self.free > slack)
            width = int(self.width[bucket[0]])
            if len(lagging) < width:
                lagging = np.arange(self.ranks)
            # A rank stays with its bucket as long as it ends no later than the last rank.
            late = self.free[lagging] + self.alone_ns[bucket[0]] > last
            strange = (late | (bucket_of_rank[lagging] != at)) & in_turn & (width == 1)
            first = np.lexsort((lagging, self.free[lagging], strange))[:width]
            chosen = sorted(lagging[first].tolist())
            bucket_of_rank[chosen] = at
            self.give(chosen, self._take(bucket, last - int(self.free[chosen].max()), width))

    def _buckets(self) -> list[deque[int]]:
        """Documents, longest first, cut into runs of nearly equal work."""
        order = np.lexsort((np.arange(len(self.lengths)), -self.lengths))
        done = np.cumsum(self.alone_ns[order]) - self.alone_ns[order] // 2
        of_item = done * _BUCKETS // int(self.alone_ns.sum() + 1)
        return [deque(order[of_item == bucket].tolist()) for bucket in range(_BUCKETS)]

    def _take(self, bucket: deque[int], lag: int, width: int) -> list[int]:
        """The bucket's next document, or as many short ones as fit and let the rank catch up."""
        taken = [bucket.popleft()]
        if width > 1 or self.ratio[taken[0]]:
            return taken
        tokens, load = int(self.lengths[taken[0]]), int(self.alone_ns[taken[0]])
        while bucket and not self.ratio[bucket[0]] and self.width[bucket[0]] == 1:
            tokens += int(self.lengths[bucket[0]])
            load += int(self.alone_ns[bucket[0]])
            if tokens > self.cap or (0 < lag < load):
                break
            taken.append(bucket.popleft())
        return taken
