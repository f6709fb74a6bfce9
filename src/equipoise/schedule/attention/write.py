"""What attention strategies write with: shares of heads, and messages with both ends.

Why
    A strategy should only say what moves; that each send has its receive is written once, here.

Kept true (tests/unit/schedule/attention/test_write.py, by Hypothesis)
    A block's heads are whole groups, or part of one.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from equipoise.schedule.attention.runs import join_runs
from equipoise.schedule.attention.schedule import (
    TILE_COLUMNS,
    Carries,
    Message,
    Round,
    Tiles,
)
from equipoise.spec.pack import Pieces


def head_blocks(first: int, stop: int, heads: int, kv_heads: int) -> list[tuple[int, int]]:
    """Query heads ``first:stop`` in blocks that a kernel takes: whole groups, or part of one.

    >>> head_blocks(2, 8, heads=9, kv_heads=3)
    [(2, 3), (3, 6), (6, 8)]
    >>> head_blocks(0, 6, heads=9, kv_heads=3)
    [(0, 6)]
    """
    if first >= stop:
        return []
    ratio = heads // kv_heads
    low, high = -(-first // ratio) * ratio, stop // ratio * ratio
    if low >= high:  # no whole group
        cuts = [first, *([low] if first < low < stop else []), stop]
    else:
        cuts = sorted({first, low, high, stop})
    return list(pairwise(cuts))


def kv_heads_of(first: int, stop: int, heads: int, kv_heads: int) -> tuple[int, int]:
    """Key/value heads that query heads ``first:stop`` read.

    >>> kv_heads_of(4, 9, heads=9, kv_heads=3), kv_heads_of(4, 4, heads=9, kv_heads=3)
    ((1, 3), (1, 1))
    """
    ratio = heads // kv_heads
    return first // ratio, -(-stop // ratio) if stop > first else first // ratio


def query_runs(tiles: Tiles) -> Pieces:
    """The query runs of some tiles."""
    return join_runs(tiles[:, :3])


@dataclass(slots=True)
class Writer:
    """Collects what happens in each round, and writes each message at both its ends."""

    ranks: int
    _sends: dict[tuple[int, int], list[Message]] = field(default_factory=dict)
    _receives: dict[tuple[int, int], list[Message]] = field(default_factory=dict)
    _tiles: dict[tuple[int, int], list[Tiles]] = field(default_factory=dict)
    _rounds: int = 0

    def send(
        self,
        at: int,
        source: int,
        target: int,
        carries: Carries,
        runs: Pieces,
        heads: tuple[int, int],
        *,
        rounds: int = 1,
    ) -> None:
        """Add a message to round ``at``, unless it is empty or to oneself."""
        if source == target or not len(runs) or heads[0] >= heads[1]:
            return
        self._rounds = max(self._rounds, at + rounds)
        sent = Message(target, carries, runs, heads, rounds)
        self._sends.setdefault((source, at), []).append(sent)
        received = Message(source, carries, runs, heads, rounds)
        self._receives.setdefault((target, at), []).append(received)

    def attend(self, at: int, rank: int, tiles: Tiles) -> Tiles:
        """Add tiles to round ``at``, and return them."""
        if len(tiles):
            self._rounds = max(self._rounds, at + 1)
            self._tiles.setdefault((rank, at), []).append(tiles)
        return tiles

    def finish(self) -> tuple[tuple[Round, ...], ...]:
        """Each rank's rounds; every rank gets as many as the longest."""
        none = np.empty((0, TILE_COLUMNS), dtype=np.int64)
        return tuple(
            tuple(
                Round(
                    tuple(self._sends.get((rank, at), ())),
                    tuple(self._receives.get((rank, at), ())),
                    np.concatenate([none, *self._tiles.get((rank, at), ())]),
                )
                for at in range(self._rounds)
            )
            for rank in range(self.ranks)
        )
