"""Which chunks form which nano-batch, and in which order their operations run.

Why
    Where prompts and generated tokens are computed together, one is bound by the cores and the
    other by memory or by the threads' waiting for each other. What that is worth depends on the
    sizes of every iteration.

What it decides
    An iteration's chunks are cut into two nano-batches: prompts and single tokens, or two halves of
    about equal time. Two layers of each are arranged by ``schedule.nano``, on both lanes or one;
    all layers follow that order. The cut that is predicted to be shortest wins, if it beats the
    whole iteration, operation by operation, by ``LEAST_GAIN``. Equal sizes, rounded to quarters of
    powers of two, are searched once.

Kept true (tests/unit/serve/nano/test_choice.py)
    Each chunk is in one nano-batch; orders are legal; what is not predicted to gain is not chosen.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from equipoise.cost.serving import read_points
from equipoise.schedule.batching.iteration import ServeChunk
from equipoise.schedule.nano.graph import Link, NanoGraph, Resource, Way, chain_graph
from equipoise.schedule.nano.schedule import NanoSchedule, repeat
from equipoise.schedule.nano.search import search_order
from equipoise.spec.device.serving import Points
from equipoise.spec.serving import chunk_pairs

WINDOW = 2
"""Layers that are arranged together."""

LEAST_GAIN = 1.03
"""Times faster that an order must be: two timings of one iteration differ by less."""

KINDS = ("prompts", "tokens", "prompts and tokens")
"""What iterations compute."""

_MOST_STATES = 1_000
_MOST = 1_024
"""Sizes that are remembered."""


Parts = tuple[tuple[int, ...], ...]
"""The chunks of each nano-batch, by their places in the iteration."""


@dataclass(frozen=True, slots=True)
class LaneCosts:
    """One layer's operations on a number of cores, with nothing beside them."""

    dense: Points
    """Everything but attention, by new tokens."""
    decode: Points
    """Attention of single tokens, by rows of keys and values."""
    prefill: Points
    """Attention of prompts, by query-key pairs."""


@dataclass(frozen=True, slots=True)
class NanoCosts:
    """What operations take on this machine."""

    both: LaneCosts
    """On the cores of both lanes."""
    one: LaneCosts
    """On one lane's."""
    beside: tuple[tuple[Resource, Resource, float], ...]
    """How many times longer an operation bound by the first takes beside one bound by the other."""


@dataclass(frozen=True, slots=True)
class NanoSizes:
    """What a nano-batch computes."""

    rows: int
    kv_tokens: int
    """Rows of keys and values that single tokens read."""
    pairs: int
    """Query-key pairs of prompts."""

    @staticmethod
    def of(chunks: Sequence[ServeChunk]) -> "NanoSizes":
        """The sizes of some chunks."""
        return NanoSizes(
            sum(each.tokens for each in chunks),
            sum(each.start + 1 for each in chunks if each.tokens == 1),
            sum(chunk_pairs(each.start, each.tokens) for each in chunks if each.tokens > 1),
        )


@dataclass(frozen=True, slots=True)
class NanoOrder:
    """Two nano-batches, and the order of their operations in all layers."""

    parts: Parts
    graph: NanoGraph
    schedule: NanoSchedule
    gain: float
    """Predicted: seconds of the whole iteration over seconds of this order."""

    @property
    def layers(self) -> int:
        """Layers that are arranged; at most one is left."""
        return len(self.graph.operations) // (2 * len(self.parts))


def kind_of(chunks: Sequence[ServeChunk]) -> str:
    """What an iteration computes: one of ``KINDS``."""
    prompts = sum(each.tokens > 1 for each in chunks)
    return KINDS[2 if 0 < prompts < len(chunks) else prompts == 0]


@dataclass(slots=True)
class NanoChoice:
    """Chooses by price, and remembers."""

    layers: int
    costs: NanoCosts
    _known: dict[tuple[int, ...], tuple[float, NanoGraph, NanoSchedule]] = field(
        default_factory=dict
    )

    def choose(self, chunks: Sequence[ServeChunk]) -> NanoOrder | None:
        """The best order of an iteration; None if it cannot be cut in two.

        Args:
            chunks: Of the iteration; at least one.
        """
        orders = [self._arrange(chunks, parts) for parts in self._cuts(chunks)]
        return max(orders, key=lambda order: order.gain, default=None)

    def _cuts(self, chunks: Sequence[ServeChunk]) -> list[Parts]:
        if len(chunks) < 2 or self.layers < WINDOW:
            return []
        cuts = [self._halves(chunks)]
        if kind_of(chunks) == KINDS[2]:
            by_kind = (
                tuple(at for at, each in enumerate(chunks) if each.tokens > 1),
                tuple(at for at, each in enumerate(chunks) if each.tokens == 1),
            )
            cuts.append(by_kind)
        return cuts

    def _halves(self, chunks: Sequence[ServeChunk]) -> Parts:
        """Longest first, each to the half with less predicted work."""
        loads_s, halves = [0.0, 0.0], (list[int](), list[int]())
        whole = NanoSizes.of(chunks)
        row_s = read_points(self.costs.both.dense, whole.rows) / whole.rows
        seconds = [
            row_s * each.tokens + _attend_s(self.costs.both, NanoSizes.of([each]))
            for each in chunks
        ]
        for at in sorted(range(len(chunks)), key=lambda at: -seconds[at]):
            half = loads_s.index(min(loads_s))
            halves[half].append(at)
            loads_s[half] += seconds[at]
        return tuple(tuple(sorted(half)) for half in halves)

    def _arrange(
        self, chunks: Sequence[ServeChunk], parts: tuple[tuple[int, ...], ...]
    ) -> NanoOrder:
        sizes = [NanoSizes.of([chunks[at] for at in part]) for part in parts]
        key = tuple(_round(x) for each in sizes for x in (each.rows, each.kv_tokens, each.pairs))
        if key not in self._known:
            if len(self._known) == _MOST:
                self._known.clear()
            costs = self.costs
            beside = {(one, other): times for one, other, times in costs.beside}
            graph = chain_graph(
                [_links(costs, each) * WINDOW for each in sizes], lanes=2, beside=beside
            )
            best = search_order(graph, most_states=_MOST_STATES)
            whole = NanoSizes.of(chunks)
            whole_s = _attend_s(costs.both, whole) + read_points(costs.both.dense, whole.rows)
            graph, schedule = repeat(graph, best, self.layers // WINDOW)
            rounds = self.layers // WINDOW * WINDOW
            self._known[key] = whole_s * rounds / schedule.seconds, graph, schedule
        gain, graph, schedule = self._known[key]
        return NanoOrder(parts, graph, schedule, gain)


def _links(costs: NanoCosts, sizes: NanoSizes) -> list[Link]:
    """One layer of a nano-batch."""

    def ways(seconds: Callable[[LaneCosts], float]) -> tuple[Way, ...]:
        one_s = seconds(costs.one)
        return Way((0, 1), seconds(costs.both)), Way((0,), one_s), Way((1,), one_s)

    return [
        Link(
            "attend", "compute" if sizes.pairs else "memory", ways(partial(_attend_s, sizes=sizes))
        ),
        Link("dense", "compute", ways(lambda lane: read_points(lane.dense, sizes.rows))),
    ]


def _attend_s(costs: LaneCosts, sizes: NanoSizes) -> float:
    decode_s = read_points(costs.decode, sizes.kv_tokens) if sizes.kv_tokens else 0.0
    return decode_s + (read_points(costs.prefill, sizes.pairs) if sizes.pairs else 0.0)


def _round(size: int) -> int:
    return round(4 * math.log2(size)) if size > 1 else size
