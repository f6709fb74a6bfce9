"""Tiles of one round as few calls of a kernel: those that share no query and no key together.

Why
    A device launches one kernel for sequences of many lengths as quickly as for one, and a round
    has a tile for every run of every document. Where each launch takes as long as a small tile,
    calls are what a round costs.

What it decides
    Tiles of one call have the same heads and are all full or all causal. None reads or writes a row
    of another, so that results can be put back without adding, in any order, and a rerun is equal
    bit for bit. Rows of ``anticausal`` tiles are listed backwards, which makes them causal::

        tiles     queries 0:3, keys 0:3, causal     queries 5:7, keys 5:7, anticausal
        one call  query_rows 0 1 2 6 5, key_rows 0 1 2 6 5, bounds 0 3 5, causal

Kept true (tests/unit/parallel/test_context_calls.py)
    Every tile is in one call; rows of a call are distinct; attention by calls equals attention by
    tiles, forward and backward.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.nn.device.send import send
from equipoise.nn.tile_cuda import TileRuns
from equipoise.schedule.attention.schedule import TileKind


@dataclass(frozen=True, slots=True, eq=False)
class TileRows:
    """A tile, as rows and heads of held tensors."""

    queries: slice
    keys: slice
    heads: slice
    kv_heads: slice
    kind: TileKind
    is_first: bool
    """Whether no earlier tile has written to any of these queries and heads."""


@dataclass(frozen=True, slots=True, eq=False)
class TileCall:
    """Several tiles, as rows of held tensors one after another."""

    query_rows: Tensor
    """int64 [queries], each once."""
    key_rows: Tensor
    """int64 [keys], each once."""
    runs: TileRuns
    """Lengths and bounds of the tiles."""
    heads: slice
    kv_heads: slice
    is_causal: bool
    is_first: bool
    """Whether no earlier tile has written to any of these queries and heads."""


class _Group:
    """Tiles of a call, while they are collected."""

    def __init__(self, tile: TileRows) -> None:
        self.tiles = [tile]

    def takes(self, tile: TileRows) -> bool:
        mine = self.tiles[0]
        is_alike = (mine.heads, mine.kv_heads) == (tile.heads, tile.kv_heads)
        return is_alike and (mine.kind == "full") == (tile.kind == "full")

    def clashes(self, tile: TileRows) -> bool:
        return any(
            _overlap(tile.queries, each.queries) or _overlap(tile.keys, each.keys)
            for each in self.tiles
        )


def group_tiles(tiles: Iterable[TileRows], device: torch.device) -> tuple[TileCall, ...]:
    """Group tiles into calls, which run one after another.

    A tile joins the first call behind the last one that it shares rows with.

    Args:
        tiles: Of one round, in order.
        device: Where their tensors are.
    """
    groups: list[_Group] = []
    for tile in tiles:
        clashing = [at for at, group in enumerate(groups) if group.clashes(tile)]
        after = clashing[-1] + 1 if clashing else 0
        home = next((group for group in groups[after:] if group.takes(tile)), None)
        if home is None:
            groups.append(_Group(tile))
        else:
            home.tiles.append(tile)
    return tuple(_call(group.tiles, device) for group in groups)


def _call(tiles: list[TileRows], device: torch.device) -> TileCall:
    queries = [_rows(tile.queries, tile.kind) for tile in tiles]
    keys = [_rows(tile.keys, tile.kind) for tile in tiles]
    first = tiles[0]
    return TileCall(
        send(torch.cat(queries), device),
        send(torch.cat(keys), device),
        TileRuns.of([len(rows) for rows in queries], [len(rows) for rows in keys], device),
        first.heads,
        first.kv_heads,
        first.kind != "full",
        all(tile.is_first for tile in tiles),
    )


def _rows(run: slice, kind: str) -> Tensor:
    rows = torch.arange(run.start, run.stop)
    return rows.flip(0) if kind == "anticausal" else rows


def _overlap(one: slice, other: slice) -> bool:
    is_apart: bool = one.stop <= other.start or other.stop <= one.start
    return not is_apart
