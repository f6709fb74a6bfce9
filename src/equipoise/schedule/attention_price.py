"""What an attention schedule takes in seconds, before it is run.

What it decides
    Rounds are replayed. A rank begins a round when its round before has ended; its tiles take
    the price of their pairs, each; its messages leave, and arrive, one after another, each
    after the latency and with the bandwidth of its link, when both ends have begun the round
    that lists it. A round ends when its tiles are done and what is due has arrived. The
    backward pass is replayed likewise, in reverse order.

    It is a model of ranks that compute and communicate at once. Two processes that share
    their cores with the threads that move bytes overlap less.

Kept true (tests/unit/schedule/test_attention_price.py)
    Never below the compute of any rank; without cost of links, equal to the longest chain of
    tiles; more latency or less bandwidth never makes it faster.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.base.errors import LayoutError
from equipoise.schedule.attention import AttentionSchedule
from equipoise.schedule.attention_count import Wire, tile_pairs

BACKWARD_OVER_FORWARD = 2.5
"""Five matrix products a tile for two: it computes the scores again. FlashAttention-2,
arXiv:2307.08691."""

TileTime = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
"""From the pairs of tiles, all heads counted as one, to their forward time [ns]."""


@dataclass(frozen=True, slots=True)
class LinkPrice:
    """Time of a message: ``latency + bytes / bandwidth``."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bytes_per_s > 0):
            raise LayoutError(
                f"A link of {self.latency_s:g} s and {self.bytes_per_s:g} bytes/s carries "
                f"nothing. Give a latency of 0 or more and a bandwidth above 0."
            )

    def message_ns(self, size_bytes: int) -> float:
        """Time of one message [ns]."""
        return 1e9 * (self.latency_s + size_bytes / self.bytes_per_s)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPrice:
    """Predicted times of each rank [ns]."""

    forward_ns: npt.NDArray[np.float64]
    backward_ns: npt.NDArray[np.float64]
    compute_ns: npt.NDArray[np.float64]
    """Of tiles alone, both passes [ns]."""

    @property
    def total_ns(self) -> float:
        """Both passes of the rank that ends last [ns]."""
        return float(self.forward_ns.max(initial=0.0) + self.backward_ns.max(initial=0.0))

    @property
    def exposed_ns(self) -> float:
        """What the slowest rank's tiles do not account for: waiting, for messages or peers."""
        return self.total_ns - float(self.compute_ns.max(initial=0.0))


def price_attention(
    schedule: AttentionSchedule,
    tile_ns: TileTime,
    link: LinkPrice,
    wire: Wire,
    *,
    node_link: LinkPrice | None = None,
    ranks_per_node: int | None = None,
) -> AttentionPrice:
    """Predict the time of one forward and one backward pass of one layer.

    Args:
        schedule: What is priced; right, as ``check_attention`` says.
        tile_ns: Forward time of tiles by their pairs in all heads; of a measured ``LoadCurve``
            a part of its ``attention_ns``.
        link: Of two ranks.
        wire: Sizes of what travels.
        node_link: Of two ranks of different nodes, if that is another.
        ranks_per_node: Ranks that share a node; with ``node_link``.

    Cost: O(tiles + messages).
    """

    def price(size_bytes: int, source: int, target: int) -> float:
        if node_link is None or not ranks_per_node:
            return link.message_ns(size_bytes)
        is_near = source // ranks_per_node == target // ranks_per_node
        return (link if is_near else node_link).message_ns(size_bytes)

    longest = max(map(len, schedule.rounds), default=0)
    compute = np.zeros((schedule.ranks, longest))
    for rank, at, each in schedule:
        share = (each.tiles[:, 7] - each.tiles[:, 6]) / schedule.heads
        whole = tile_pairs(each.tiles) / np.maximum(each.tiles[:, 7] - each.tiles[:, 6], 1)
        compute[rank, at] = float((tile_ns(whole.astype(np.float64)) * share).sum())
    forward, backward = [], []
    for source, at, each in schedule:
        for message in each.sends:
            first, last = at, at + message.rounds - 1
            ahead = price(wire.forward_bytes(message), source, message.peer)
            back = price(wire.backward_bytes(message), message.peer, source)
            forward.append(_Flight(source, message.peer, first, last, ahead))
            mirrored = longest - 1 - last, longest - 1 - first
            backward.append(_Flight(message.peer, source, *mirrored, back))
    forward_ns = _replay(compute, forward)
    backward_ns = _replay(BACKWARD_OVER_FORWARD * compute[:, ::-1], backward)
    total: npt.NDArray[np.float64] = (1 + BACKWARD_OVER_FORWARD) * compute.sum(axis=1)
    return AttentionPrice(forward_ns, backward_ns, total)


@dataclass(frozen=True, slots=True)
class _Flight:
    source: int
    target: int
    first: int
    last: int
    ns: float


def _replay(compute_ns: npt.NDArray[np.float64], flights: list[_Flight]) -> npt.NDArray[np.float64]:
    """When each rank ends, from what its rounds compute and which messages fly between them."""
    ranks, rounds = compute_ns.shape
    begin = np.zeros(ranks)
    leaves, arrives = np.zeros(ranks), np.zeros(ranks)  # when each rank's two ports are free
    due: list[list[tuple[int, float]]] = [[] for _ in range(rounds)]
    for at in range(rounds):
        for flight in (f for f in flights if f.first == at):
            start = max(
                begin[flight.source],
                begin[flight.target],
                leaves[flight.source],
                arrives[flight.target],
            )
            end = start + flight.ns
            leaves[flight.source] = arrives[flight.target] = end
            due[flight.last] += [(flight.source, end), (flight.target, end)]
        ends = begin + compute_ns[:, at]
        for rank, end in due[at]:
            ends[rank] = max(ends[rank], end)
        begin = ends
    return begin
