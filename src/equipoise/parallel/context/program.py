"""One rank's part of an attention schedule, in rows of its tensors instead of tokens.

Why
    A schedule speaks of tokens of documents. A rank has tensors: those of its *home* tokens, and
    those that it *holds*, which are its home tokens and those that others sent, in document
    order, so that the keys of a tile are contiguous wherever they came from::

        home [2, 4) of document 0, and all of document 1; received [0, 2) of document 0

        home   0[2:4]  1[0:3]
        held   0[0:2]  0[2:4]  1[0:3]      a tile of keys 0:4 is one slice

    If nothing is received, held is home, and nothing is copied.

What it decides
    Rows of every message and tile. Heads that a rank neither computes nor forwards are not
    held: under Ulysses, held tensors have all tokens and a share of the heads.

Kept true (tests/unit/parallel/test_context.py, by Hypothesis)
    Whatever the schedule, the executor that obeys these rows equals one rank.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch

from equipoise.base.arrays import Ints
from equipoise.nn.device.send import send
from equipoise.parallel.context.calls import TileCall, TileRows, group_tiles
from equipoise.schedule.attention.runs import join_runs
from equipoise.schedule.attention.schedule import (
    TILE_KINDS,
    AttentionSchedule,
    Carries,
    Message,
)
from equipoise.spec.pack import Pieces

_CPU = torch.device("cpu")

Rows = slice | torch.Tensor
"""Rows of a tensor: a slice, or int64 indices without repetition."""


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A message of this rank, as rows."""

    peer: int
    carries: Carries
    is_held: bool
    """Whether its rows are those of held tensors, not of home tensors."""
    rows: Rows
    heads: slice
    """Heads of those tensors."""
    tokens: int
    tag: int
    """The number of messages before it on its link."""
    posted: int
    """Round in which it is posted."""
    due: int
    """Round at whose end it has arrived."""

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens and heads."""
        return self.tokens, self.heads.stop - self.heads.start


@dataclass(frozen=True, slots=True, eq=False)
class RankRound:
    """One round."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    tiles: tuple[TileRows, ...]
    calls: tuple[TileCall, ...] = ()
    """The same tiles, for devices that take several in one call of a kernel."""


@dataclass(frozen=True, slots=True, eq=False)
class RankProgram:
    """Everything that one rank does for one attention layer."""

    rank: int
    home_tokens: int
    heads: int
    kv_heads: int
    query_rows: Rows
    """Rows of held queries that are at home, in home order."""
    key_tokens: int
    """Its home tokens and those whose keys it has cached."""
    key_rows: Rows
    """Rows of held keys that are at home or cached, in order of (document, token)."""
    held_queries: int
    held_keys: int
    held_heads: slice
    """Query heads that are held."""
    held_kv_heads: slice
    rounds: tuple[RankRound, ...]

    @property
    def holds_home_queries_alone(self) -> bool:
        """Whether held queries are the home queries, in all heads."""
        return self.held_queries == self.home_tokens and self.held_heads == slice(0, self.heads)


class _Places:
    """Places of tokens in a tensor whose rows are consecutive runs."""

    def __init__(self, runs: Pieces, device: torch.device) -> None:
        self.device = device
        sizes = runs[:, 2] - runs[:, 1]
        self.span = int(runs[:, 2].max(initial=0)) + 1
        self.keys = runs[:, 0] * self.span + runs[:, 1]
        self.offsets = np.cumsum(sizes) - sizes - runs[:, 1]
        self.tokens = int(sizes.sum())

    def first(self, documents: Ints, starts: Ints) -> list[int]:
        """Rows of some tokens."""
        if not len(starts):
            return []
        runs = np.searchsorted(self.keys, documents * self.span + starts, side="right") - 1
        rows: list[int] = (self.offsets[runs] + starts).tolist()
        return rows

    def rows(self, runs: Pieces) -> Rows:
        if not len(runs):
            return slice(0, 0)
        at = np.searchsorted(self.keys, runs[:, 0] * self.span + runs[:, 1], side="right") - 1
        starts, sizes = self.offsets[at] + runs[:, 1], runs[:, 2] - runs[:, 1]
        if (starts[1:] == starts[:-1] + sizes[:-1]).all():
            return slice(int(starts[0]), int(starts[0] + sizes.sum()))
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return send(torch.from_numpy(np.repeat(starts, sizes) + within), self.device)


def _range(ranges: list[tuple[int, int]]) -> slice:
    """The heads from the first to the last of some ranges."""
    if not ranges:
        return slice(0, 0)
    return slice(min(first for first, _ in ranges), max(stop for _, stop in ranges))


@functools.lru_cache(maxsize=64)
def compile_rank(
    schedule: AttentionSchedule,
    rank: int,
    device: torch.device = _CPU,
    *,
    by_calls: bool | None = None,
) -> RankProgram:
    """Turn one rank's rounds into rows of its tensors.

    Args:
        schedule: A schedule that ``check_attention`` accepts.
        rank: The rank to compile for.
        device: Where its tensors are, and so the indices of their rows.
        by_calls: Whether tiles run several in one call of a kernel; by default on a device whose
            kernels take several.

    Cost: O(messages x runs + tiles x heads); the last 64 programs are kept.
    """
    if by_calls is None:
        by_calls = device.type == "cuda"
    compiler = _Compiler(schedule, rank, device, by_calls=by_calls)
    home = schedule.home[rank]
    return RankProgram(
        rank=rank,
        home_tokens=compiler.home.tokens,
        heads=schedule.heads,
        kv_heads=schedule.kv_heads,
        query_rows=compiler.queries.rows(home),
        key_tokens=compiler.own_keys.tokens,
        key_rows=compiler.keys.rows(schedule.keys_of(rank)),
        held_queries=compiler.queries.tokens,
        held_keys=compiler.keys.tokens,
        held_heads=compiler.heads,
        held_kv_heads=compiler.kv_heads,
        rounds=tuple(compiler.compile(at) for at in range(len(schedule.rounds[rank]))),
    )


class _Compiler:
    def __init__(
        self, schedule: AttentionSchedule, rank: int, device: torch.device, *, by_calls: bool
    ) -> None:
        self.device, self.by_calls = device, by_calls
        self.source = schedule.rounds[rank]
        self.ratio = schedule.heads // schedule.kv_heads
        home = schedule.home[rank]
        received = [message for each in self.source for message in each.receives]
        own_keys = schedule.keys_of(rank)
        self.home, self.own_keys = _Places(home, device), _Places(own_keys, device)
        self.queries, self.keys = (
            _Places(join_runs(own, *(m.runs for m in received if m.carries == kind)), device)
            for kind, own in (("q", home), ("kv", own_keys))
        )
        tiles = [
            (first, stop)
            for each in self.source
            for first, stop in np.unique(each.tiles[:, 6:8], axis=0).tolist()
        ]
        merged = [m.heads for m in received if m.carries in ("q", "partial")]
        self.heads = _range(tiles + merged)
        of_tiles = [(first // self.ratio, -(-stop // self.ratio)) for first, stop in tiles]
        self.kv_heads = _range(of_tiles + [m.heads for m in received if m.carries == "kv"])
        count = self.heads.stop - self.heads.start
        self.turns: dict[tuple[bool, int], int] = {}
        self.is_written = np.zeros((self.queries.tokens, count), dtype=bool)

    def compile(self, at: int) -> RankRound:
        each = self.source[at]
        tiles = each.tiles
        queries = self.queries.first(tiles[:, 0], tiles[:, 1])
        keys = self.keys.first(tiles[:, 0], tiles[:, 3])
        rows = tuple(map(self._tile, tiles.tolist(), queries, keys))
        return RankRound(
            tuple(self._transfer(message, at, is_sent=True) for message in each.sends),
            tuple(self._transfer(message, at, is_sent=False) for message in each.receives),
            rows,
            group_tiles(rows, self.device) if self.by_calls else (),
        )

    def _transfer(self, message: Message, at: int, *, is_sent: bool) -> Transfer:
        first, stop = message.heads
        held = self.kv_heads if message.carries == "kv" else self.heads
        is_held = held.start <= first and stop <= held.stop
        if message.carries == "output" and not is_sent:
            is_held = False  # an output over all keys is not merged
        of_keys = message.carries == "kv"
        places, own = (self.keys, self.own_keys) if of_keys else (self.queries, self.home)
        offset = held.start if is_held else 0
        turn = self.turns.get((is_sent, message.peer), 0)
        self.turns[is_sent, message.peer] = turn + 1
        return Transfer(
            message.peer,
            message.carries,
            is_held,
            (places if is_held else own).rows(message.runs),
            slice(first - offset, stop - offset),
            message.tokens,
            turn,
            at,
            at + message.rounds - 1,
        )

    def _tile(self, tile: list[int], query: int, key: int) -> TileRows:
        _, q0, q1, k0, k1, kind, h0, h1 = tile
        queries = slice(query, query + q1 - q0)
        heads = slice(h0 - self.heads.start, h1 - self.heads.start)
        kv = self.kv_heads.start
        is_first = not self.is_written[queries, heads].any()
        self.is_written[queries, heads] = True
        return TileRows(
            queries,
            slice(key, key + k1 - k0),
            heads,
            slice(h0 // self.ratio - kv, -(-h1 // self.ratio) - kv),
            TILE_KINDS[kind],
            is_first,
        )
