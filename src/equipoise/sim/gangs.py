"""Ranks that hold parts of the same documents: how long a layer takes them, and their waits.

Why
    A rank that holds a part of a document reads keys of the other parts, so in every layer the
    ranks of a document go at one pace: that of the one that ends last.

What it decides
    A *gang* is the ranks of one turn that documents join, directly or through others. Their
    attention is the schedule that the executor runs (``schedule.attention.schedule``), each message
    over the link between its two ranks. A layer of the gang ends when its last rank does: each
    begins its attention when its own other kernels are done. Of gangs too wide to replay message by
    message, a rank's messages are added up at its port instead.

Kept true (tests/unit/sim/test_divided.py)
    No gang is faster than any of its ranks computes; pairs of all tiles are the documents'.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.schedule.attention.count import Wire
from equipoise.schedule.attention.price import LinkPrice, Links, replay_pass, tiles_by_round
from equipoise.schedule.attention.schedule import AttentionSchedule
from equipoise.spec.pack import Pieces, lengths_of

_MOST_RANKS = 96
"""Most ranks of a gang that is replayed: some 9,000 messages a pass, and 50 ms."""

TileNs = Callable[..., Floats]
"""``AttentionCore.tiles_ns``."""


# `cached_property` needs a __dict__, which slots leave out.
@dataclass(frozen=True, eq=False)
class TurnGang:
    """Ranks that run one turn together."""

    ranks: tuple[int, ...]
    """Numbers among the data-parallel ranks."""
    home: tuple[Pieces, ...]
    """Each rank's pieces, int64 [n, 3]: document of this gang, start, stop."""
    doc_tokens: Ints
    """Length of each document, int64 [documents]."""

    @cached_property
    def tokens(self) -> Ints:
        """Tokens of each rank, int64 [ranks]."""
        return np.array([int(lengths_of(pieces).sum()) for pieces in self.home], dtype=np.int64)

    @cached_property
    def pairs(self) -> list[Ints]:
        """What the queries of each piece read, by rank, int64 [pieces]."""
        return [lengths_of(pieces) * (pieces[:, 1] + pieces[:, 2] + 1) // 2 for pieces in self.home]

    @cached_property
    def received_tokens(self) -> Ints:
        """Tokens of others whose keys each rank reads, int64 [ranks]."""
        received = np.zeros(len(self.home), dtype=np.int64)
        for rank, pieces in enumerate(self.home):
            last = np.zeros(len(self.doc_tokens), dtype=np.int64)
            np.maximum.at(last, pieces[:, 0], pieces[:, 2])
            received[rank] = last.sum() - self.tokens[rank]
        return received

    @cached_property
    def sent_tokens(self) -> Ints:
        """Tokens of each rank, as often as another reads them, int64 [ranks]."""
        last = np.zeros((len(self.home), len(self.doc_tokens)), dtype=np.int64)
        for rank, pieces in enumerate(self.home):
            np.maximum.at(last[rank], pieces[:, 0], pieces[:, 2])
        sent = np.zeros(len(self.home), dtype=np.int64)
        for rank, pieces in enumerate(self.home):
            read = np.minimum(last[:, pieces[:, 0]], pieces[:, 2]) - pieces[:, 1]
            sent[rank] = np.maximum(read, 0).sum() - lengths_of(pieces).sum()
        return sent


@dataclass(frozen=True, slots=True, eq=False)
class GangCore:
    """A gang's attention core in one layer, on the links of its ranks."""

    gang: TurnGang
    schedule: AttentionSchedule | None
    """None for a gang that is too wide to replay."""
    forward_ns: Floats
    """Computing of each rank in each round, float64 [ranks, rounds]."""
    backward_ns: Floats
    links: Links
    wire: Wire
    token_bytes: int
    """Keys and values of a token, this rank's heads [bytes]."""

    def compute_s(self) -> tuple[Floats, Floats]:
        """Forward and backward of each rank without waiting, float64 [ranks] [s]."""
        return 1e-9 * self.forward_ns.sum(axis=1), 1e-9 * self.backward_ns.sum(axis=1)

    def ends_s(self, starts_s: Floats, *, is_backward: bool = False) -> Floats:
        """When each rank is through one pass, float64 [ranks] [s].

        Args:
            starts_s: When its other kernels are done and it begins, float64 [ranks].
            is_backward: Which pass.
        """
        compute = self.backward_ns if is_backward else self.forward_ns
        if self.schedule is not None:
            replay = replay_pass(
                *(self.schedule, compute, self.links, self.wire),
                is_backward=is_backward,
                starts_ns=1e9 * starts_s,
            )
            return 1e-9 * replay.ends_ns
        own, rest = 1e-9 * compute.T
        begin = starts_s + rest if is_backward else starts_s
        there = float(begin.max()) + self._travel_s(is_backward)
        if is_backward:
            return np.asarray(np.maximum(begin + own, there))
        return np.asarray(np.maximum(begin + own, there) + rest)

    def _travel_s(self, is_backward: bool) -> Floats:
        """Seconds of all messages through each rank's port, float64 [ranks]."""
        links, peers = self.links, len(self.gang.ranks) - 1
        link: LinkPrice = links.far if len(set(links.node_of)) > 1 else links.near
        wider = self.wire.sum_bytes / self.wire.element_bytes if is_backward else 1.0
        most = np.maximum(self.gang.received_tokens, self.gang.sent_tokens)
        size = wider * self.token_bytes * most
        return np.asarray(peers * link.latency_s + size / link.bytes_per_s)


def make_core(
    gang: TurnGang,
    write: Callable[[TurnGang], AttentionSchedule],
    tiles_ns: TileNs,
    links: Links,
    wire: Wire,
    kv_heads: int,
) -> GangCore:
    """Time of a gang's attention, without its waits.

    Args:
        gang: Of two ranks or more.
        write: The schedule that the executor runs for it.
        tiles_ns: Of tiles, by pairs and by the round that each is in.
        links: Between its ranks.
        wire: Sizes of what travels.
        kv_heads: Of this rank.
    """
    token_bytes = 2 * kv_heads * wire.head_width * wire.element_bytes
    if len(gang.ranks) <= _MOST_RANKS:
        schedule = write(gang)
        forward = tiles_by_round(schedule, lambda pairs, at: tiles_ns(pairs, at))
        backward = tiles_by_round(schedule, lambda pairs, at: tiles_ns(pairs, at, backward=True))
        return GangCore(gang, schedule, forward, backward, links, wire, token_bytes)
    counts = [len(pieces) for pieces in gang.home]
    rank = np.repeat(np.arange(len(counts)), counts)
    pieces = np.concatenate(gang.home)
    size = lengths_of(pieces)
    own = size * (size + 1) // 2
    others = np.concatenate(gang.pairs) - own
    pairs, rounds = np.stack((own, others)).reshape(-1), np.concatenate((2 * rank, 2 * rank + 1))

    def table(*, backward: bool) -> Floats:
        each = tiles_ns(pairs.astype(np.float64), rounds, backward=backward)
        whole = np.bincount(rounds, np.where(pairs > 0, each, 0.0), 2 * len(counts))
        return whole.astype(np.float64).reshape(-1, 2)

    tables = table(backward=False), table(backward=True)
    return GangCore(gang, None, *tables, links, wire, token_bytes)
