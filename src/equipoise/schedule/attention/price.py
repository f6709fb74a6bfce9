"""Predict the time of an attention schedule by replaying it.

What it decides
    A rank begins a round when its previous round has ended. Each tile takes the price of its
    pairs. Messages leave once both ends have begun the round that lists them, one after another
    per port, and take the latency and bandwidth of their link. A round ends when its tiles are
    done and what is due has arrived. The backward pass is the same in reverse order.

    Within a round, messages that are due first go first; then each rank's to its next neighbour,
    then to the one after that, so messages of an all-to-all never collide at a receiver. If
    links within and between nodes differ, they have separate ports and do not delay each other.

    The model assumes that ranks compute and communicate at once. Processes that share their
    cores with the threads that move bytes overlap less.

Kept true (tests/unit/schedule/attention/test_price.py)
    The price is never below the compute of any rank; with free links it is the longest chain of
    tiles; more latency or less bandwidth never lowers it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.base.errors import LayoutError
from equipoise.schedule.attention.count import Wire, tile_pairs
from equipoise.schedule.attention.schedule import (
    TILE_COLUMNS,
    TILE_KINDS,
    AttentionSchedule,
    Carries,
)

BACKWARD_OVER_FORWARD = 2.5
"""Five matrix products per tile instead of two, since scores are recomputed. FlashAttention-2,
arXiv:2307.08691."""

TileTime = Callable[[npt.NDArray[np.float64], npt.NDArray[np.int64]], npt.NDArray[np.float64]]
"""From each tile's pairs, summed over heads, and its round's number to its forward time [ns]; what
one rank computes in one round may be one kernel."""


@dataclass(frozen=True, slots=True)
class LinkPrice:
    """Time of a message: ``latency + bytes / bandwidth``."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bytes_per_s > 0):
            raise LayoutError(
                f"A link has a latency of {self.latency_s:g} s and a bandwidth of "
                f"{self.bytes_per_s:g} bytes/s. Give 0 or more and above 0."
            )

    def message_ns(self, size_bytes: int) -> float:
        """Time of one message [ns]."""
        return 1e9 * (self.latency_s + size_bytes / self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Flight:
    """One message in flight, in one pass."""

    source: int
    target: int
    carries: Carries
    size_bytes: int
    first: int
    """The round that both ends must have begun before it leaves."""
    last: int
    """The round that neither end finishes before it has arrived."""
    start_ns: float
    end_ns: float


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The timeline of one pass, from its start."""

    begins_ns: npt.NDArray[np.float64]
    """When each rank begins each round, float64 [ranks, rounds] [ns]; in the backward pass the
    schedule's last round comes first."""
    compute_ns: npt.NDArray[np.float64]
    """Time of each round's tiles, float64 [ranks, rounds] [ns]."""
    ends_ns: npt.NDArray[np.float64]
    """When each rank finishes, float64 [ranks] [ns]."""
    flights: tuple[Flight, ...]
    """Messages in the order in which they leave, round by round."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPrice:
    """Predicted times of each rank [ns]."""

    forward: Replay
    backward: Replay
    compute_ns: npt.NDArray[np.float64]
    """Time of tiles alone, both passes [ns]."""

    @property
    def forward_ns(self) -> npt.NDArray[np.float64]:
        """When each rank ends its forward pass [ns]."""
        return self.forward.ends_ns

    @property
    def backward_ns(self) -> npt.NDArray[np.float64]:
        """How long after the backward pass's start each rank ends it [ns]."""
        return self.backward.ends_ns

    @property
    def total_ns(self) -> float:
        """Both passes, until the last rank ends [ns]."""
        return float(self.forward_ns.max(initial=0.0) + self.backward_ns.max(initial=0.0))

    @property
    def exposed_ns(self) -> float:
        """What the busiest rank's tiles do not account for: waiting for messages or peers [ns]."""
        return self.total_ns - float(self.compute_ns.max(initial=0.0))


def price_attention(
    schedule: AttentionSchedule,
    tile_ns: TileTime,
    link: LinkPrice,
    wire: Wire,
    *,
    full_ns: TileTime | None = None,
    node_link: LinkPrice | None = None,
    ranks_per_node: int | None = None,
    block: int = 1,
    call_ns: float = 0.0,
) -> AttentionPrice:
    """Predict the time of one forward and one backward pass of one layer.

    Args:
        schedule: A schedule that passes ``check_attention``.
        tile_ns: Forward time of tiles by their pairs in all heads, called once for all tiles;
            for a measured ``LoadCurve`` a part of its ``attention_ns``.
        link: Link between two ranks.
        wire: Sizes of what travels.
        full_ns: ``tile_ns`` of full tiles, if it differs: kernels compute whole blocks, and
            lose what the mask cuts off them.
        node_link: Link between ranks of different nodes, if it differs.
        ranks_per_node: Ranks that share a node; with ``node_link``.
        block: Queries and keys of a kernel's block, which is computed whole [tokens].
        call_ns: Fixed time of each tile's kernel, whatever its heads [ns].

    Cost: O(tiles + messages).
    """
    per_node = max(1, schedule.ranks if node_link is None else ranks_per_node or schedule.ranks)
    node_of = tuple(rank // per_node for rank in range(schedule.ranks))
    links = Links(link, node_link or link, node_of)
    compute = tiles_by_round(schedule, tile_ns, full_ns, block=block, call_ns=call_ns)
    total: npt.NDArray[np.float64] = (1 + BACKWARD_OVER_FORWARD) * compute.sum(axis=1)
    return AttentionPrice(
        replay_pass(schedule, compute, links, wire),
        replay_pass(schedule, BACKWARD_OVER_FORWARD * compute, links, wire, is_backward=True),
        total,
    )


@dataclass(frozen=True, slots=True)
class Links:
    """The links between a schedule's ranks."""

    near: LinkPrice
    far: LinkPrice
    node_of: tuple[int, ...]
    """Each rank's node; ``far`` links ranks of different nodes."""

    def is_far(self, source: int, target: int) -> bool:
        """Whether a message between them leaves its node."""
        return self.node_of[source] != self.node_of[target]


def replay_pass(
    schedule: AttentionSchedule,
    compute_ns: npt.NDArray[np.float64],
    links: Links,
    wire: Wire,
    *,
    is_backward: bool = False,
    starts_ns: npt.NDArray[np.float64] | None = None,
) -> Replay:
    """Replay one pass of one layer.

    Args:
        schedule: The schedule to replay.
        compute_ns: Time of each round's tiles in this pass, float64 [ranks, rounds], by the
            rounds of the forward pass [ns].
        links: Links between its ranks.
        wire: Sizes of what travels.
        is_backward: Whether rounds run in reverse and carry gradients.
        starts_ns: When each rank begins, float64 [ranks]; 0 unless given [ns].
    """
    longest = compute_ns.shape[1]
    planned = []
    for source, at, each in schedule:
        for message in each.sends:
            first, last, carries = at, at + message.rounds - 1, message.carries
            if is_backward:
                size, ends = wire.backward_bytes(message), (message.peer, source)
                first, last = longest - 1 - last, longest - 1 - first
            else:
                size, ends = wire.forward_bytes(message), (source, message.peer)
            planned.append(_Planned(*ends, carries, size, first, last))
    starts = np.zeros(schedule.ranks) if starts_ns is None else starts_ns
    return _replay(compute_ns[:, ::-1] if is_backward else compute_ns, planned, links, starts)


def tiles_by_round(
    schedule: AttentionSchedule,
    tile_ns: TileTime,
    full_ns: TileTime | None = None,
    *,
    block: int = 1,
    call_ns: float = 0.0,
) -> npt.NDArray[np.float64]:
    """Time of each round's tiles, all priced at once, float64 [ranks, rounds] [ns]."""
    longest = max(map(len, schedule.rounds), default=0)
    places = [(rank, at, len(each.tiles)) for rank, at, each in schedule]
    none = np.zeros((0, TILE_COLUMNS), np.int64)
    tiles = np.concatenate([none, *(each.tiles for *_, each in schedule)])
    heads = tiles[:, 7] - tiles[:, 6]
    whole = tile_pairs(tiles, block=block) / np.maximum(heads, 1)
    rank, at, count = np.array(places, dtype=np.int64).reshape(-1, 3).T
    of_round = np.repeat(rank * longest + at, count)
    tiles_ns = tile_ns(whole, of_round)
    if full_ns is not None:
        is_full = tiles[:, 5] == TILE_KINDS.index("full")
        tiles_ns = np.where(is_full, full_ns(whole, of_round), tiles_ns)
    shares = tiles_ns * (heads / schedule.heads) + call_ns
    totals = np.bincount(of_round, shares, schedule.ranks * longest).astype(np.float64)
    return totals.reshape(schedule.ranks, longest)


@dataclass(frozen=True, slots=True)
class _Planned:
    source: int
    target: int
    carries: Carries
    size_bytes: int
    first: int
    last: int


def _replay(
    compute_ns: npt.NDArray[np.float64],
    planned: list[_Planned],
    links: Links,
    starts_ns: npt.NDArray[np.float64],
) -> Replay:
    """The timeline, given each round's compute and the messages between rounds."""
    ranks, rounds = compute_ns.shape
    begin, begins = starts_ns, np.zeros((ranks, rounds))
    leaves, arrives = np.zeros((2, ranks)), np.zeros((2, ranks))  # when ports are free
    due: list[list[Flight]] = [[] for _ in range(rounds)]
    leaving: list[list[_Planned]] = [[] for _ in range(rounds)]
    for each in planned:
        leaving[each.first].append(each)
    flights = []
    for at in range(rounds):
        begins[:, at] = begin
        for m in sorted(leaving[at], key=lambda m: (m.last, (m.target - m.source) % ranks)):
            far = int(links.is_far(m.source, m.target))
            ports = leaves[far, m.source], arrives[far, m.target]
            start = float(max(begin[m.source], begin[m.target], *ports))
            end = start + (links.far if far else links.near).message_ns(m.size_bytes)
            leaves[far, m.source] = arrives[far, m.target] = end
            flight = Flight(m.source, m.target, m.carries, m.size_bytes, at, m.last, start, end)
            due[m.last].append(flight)
            flights.append(flight)
        ends = begin + compute_ns[:, at]
        for flight in due[at]:
            for rank in (flight.source, flight.target):
                ends[rank] = max(ends[rank], flight.end_ns)
        begin = ends
    return Replay(begins, compute_ns, begin, tuple(flights))
