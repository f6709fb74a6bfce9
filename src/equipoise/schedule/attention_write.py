"""What every attention strategy is written with: runs, the tiles between them, messages.

Why
    A strategy should say what moves. Which tiles two sets of runs have in common, and that
    each send has its receive, is the same for all of them and is written once.

What it decides
    Tiles of a query run come together, its causal ones first: they are written to a fresh
    output, and the others merged into it. Runs are in order of (document, start).

Kept true (tests/unit/schedule/test_attention_write.py, by Hypothesis)
    Tiles between any runs cover exactly the causal pairs between them, each once.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from equipoise.schedule.attention import (
    TILE_COLUMNS,
    AttentionSchedule,
    Carries,
    Message,
    Round,
    Tiles,
)
from equipoise.spec.pack import Pieces

NO_RUNS: Pieces = np.empty((0, 3), dtype=np.int64)


def join_runs(*parts: Pieces) -> Pieces:
    """All runs in order, those that lie side by side made one.

    >>> join_runs(np.array([[0, 4, 6], [0, 8, 9]]), np.array([[0, 0, 4]])).tolist()
    [[0, 0, 6], [0, 8, 9]]
    """
    runs = np.concatenate([NO_RUNS, *parts])
    runs = runs[runs[:, 1] < runs[:, 2]]
    runs = runs[np.lexsort((runs[:, 1], runs[:, 0]))]
    is_first = np.ones(len(runs), dtype=bool)
    is_first[1:] = (runs[1:, 0] != runs[:-1, 0]) | (runs[1:, 1] > runs[:-1, 2])
    begins = np.flatnonzero(is_first)
    joined = runs[begins]
    if len(runs):
        joined[:, 2] = np.maximum.reduceat(runs[:, 2], begins)
    return joined


def keys_read(queries: Pieces, keys: Pieces) -> Pieces:
    """The part of some key runs that a causal query of ``queries`` reads.

    >>> keys_read(np.array([[0, 4, 6], [1, 0, 2]]), np.array([[0, 5, 9], [1, 2, 3]])).tolist()
    [[0, 5, 6]]
    """
    if not len(queries) or not len(keys):
        return NO_RUNS
    ends = np.zeros(max(queries[:, 0].max(), keys[:, 0].max()) + 1, dtype=np.int64)
    np.maximum.at(ends, queries[:, 0], queries[:, 2])
    cut = keys.copy()
    cut[:, 2] = np.minimum(keys[:, 2], ends[keys[:, 0]])
    return cut[cut[:, 1] < cut[:, 2]]


def head_blocks(first: int, stop: int, heads: int, kv_heads: int) -> list[tuple[int, int]]:
    """Query heads ``first:stop`` in blocks that a kernel takes: whole groups, or within one.

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


def tiles_between(queries: Pieces, keys: Pieces, blocks: list[tuple[int, int]]) -> Tiles:
    """Tiles of the causal pairs between query runs and key runs.

    Args:
        queries: Runs int64 [n, 3], apart from each other.
        keys: Runs int64 [m, 3], apart from each other, in order of (document, start).
        blocks: Query heads of each tile, one tile a block.

    Returns:
        Tiles int64 [k, 8].

    Cost: O(n log m) and what is returned.

    >>> tiles_between(np.array([[0, 2, 4]]), np.array([[0, 0, 4]]), [(0, 1)]).tolist()
    [[0, 2, 4, 2, 4, 1, 0, 1], [0, 2, 4, 0, 2, 0, 0, 1]]
    """
    if not len(queries) or not len(keys) or not blocks:
        return np.empty((0, TILE_COLUMNS), dtype=np.int64)
    span = int(max(queries[:, 2].max(), keys[:, 2].max())) + 1
    at = keys[:, 0] * span + keys[:, 1]
    low = np.searchsorted(keys[:, 0], queries[:, 0])
    count = np.searchsorted(at, queries[:, 0] * span + queries[:, 2]) - low
    query = np.repeat(np.arange(len(queries)), count)
    key = np.arange(len(query)) - np.repeat(np.cumsum(count) - count - low, count)
    document, q0, q1 = queries[query].T
    _, k0, k1 = keys[key].T
    low, high = np.maximum(q0, k0), np.minimum(q1, k1)
    zero, one = np.zeros_like(q0), np.ones_like(q0)
    before = np.stack((document, q0, q1, k0, np.minimum(k1, q0), zero), axis=1)
    square = np.stack((document, low, high, low, high, one), axis=1)
    after = np.stack((document, high, q1, low, high, zero), axis=1)
    after[low >= high] = 0  # no keys inside the queries' run
    tiles = np.concatenate((before, square, after))
    query = np.tile(query, 3)
    kept = (tiles[:, 1] < tiles[:, 2]) & (tiles[:, 3] < tiles[:, 4])
    tiles, query = tiles[kept], query[kept]
    order = np.lexsort((tiles[:, 3], tiles[:, 1], -tiles[:, 5], query))
    rows = np.repeat(tiles[order], len(blocks), axis=0)
    return np.concatenate((rows, np.tile(np.array(blocks), (len(order), 1))), axis=1)


def query_runs(tiles: Tiles) -> Pieces:
    """Queries that have a tile among these."""
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
        """A message of round ``at``, unless it is empty or to oneself."""
        if source == target or not len(runs) or heads[0] >= heads[1]:
            return
        self._rounds = max(self._rounds, at + rounds)
        sent = Message(target, carries, runs, heads, rounds)
        self._sends.setdefault((source, at), []).append(sent)
        received = Message(source, carries, runs, heads, rounds)
        self._receives.setdefault((target, at), []).append(received)

    def attend(self, at: int, rank: int, tiles: Tiles) -> Tiles:
        """Tiles of round ``at``; returns them."""
        if len(tiles):
            self._rounds = max(self._rounds, at + 1)
            self._tiles.setdefault((rank, at), []).append(tiles)
        return tiles

    def finish(
        self,
        strategy: str,
        home: tuple[Pieces, ...],
        doc_tokens: Pieces,
        heads: int,
        kv_heads: int,
    ) -> AttentionSchedule:
        """The schedule; every rank has as many rounds as the one that has most."""
        none = np.empty((0, TILE_COLUMNS), dtype=np.int64)
        rounds = tuple(
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
        return AttentionSchedule(strategy, doc_tokens, heads, kv_heads, home, rounds)
