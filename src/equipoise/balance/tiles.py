"""Attention tiles that a kernel touches for a piece of a document.

Why
    A kernel multiplies whole tiles and masks what it does not need. Two ways to split the same
    documents have the same exact pairs, but one may touch twice as many tiles.

What it decides
    Where tiles begin. A piece is launched as a sequence of its own, so query tiles begin at
    the piece's first token; its keys are gathered from the document's first token, so key
    tiles begin there::

        document of 10 tokens, tile 4, piece [3, 9)

        keys      0 1 2 3|4 5 6 7|8 9
        queries 3 # # # #|. . . .|       rows 3 to 6 reach key 6: 2 tiles of keys
                4 # # # #|# . . .|
                5 # # # #|# # . .|
                6 # # # #|# # # .|
               ------------------------
                7 # # # #|# # # #|. .    rows 7 and 8 reach key 8: 3 tiles of keys
                8 # # # #|# # # #|# .

    5 tiles of 16 pairs for 39 exact pairs. A cut at a multiple of the tile adds none: both
    sides together touch exactly the tiles of the whole document.

Kept true (tests/unit/balance/context/test_tiles.py, by Hypothesis)
    Counts equal those of the explicit mask; they are never below exact pairs; a document cut
    at multiples of the tile keeps the tiles of the whole.
"""

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.cost.work import CAUSAL, Mask

TILE = 128
"""Queries and keys of one tile in flash-attention kernels [tokens]."""


def count_tile_pairs(
    starts: Ints, stops: Ints, doc_tokens: Ints, *, tile: int = TILE, mask: Mask = CAUSAL
) -> Ints:
    """Pairs in the tiles that each piece touches [pairs].

    Args:
        starts: First query of each piece, counted from the document's first token.
        stops: One past its last query, above ``starts``.
        doc_tokens: Length of the document of each piece [tokens].
        tile: Queries, and keys, of a tile [tokens].
        mask: Causal, full or a window.

    Cost: O(pieces); under a window O(tiles of queries).

    >>> count_tile_pairs(np.array([3]), np.array([9]), np.array([10]), tile=4).tolist()
    [80]
    """
    rows = -(-(stops - starts) // tile)
    if mask.kind == "full":
        return rows * -(-doc_tokens // tile) * tile**2
    if mask.kind == "window":
        return _count_window(starts, stops, rows, tile, mask.window_tokens)
    # Query tiles end ``tile`` tokens apart, except the last, which ends at ``stop``.
    first = -(-starts // tile)
    tiles: Ints = (rows - 1) * first + (rows - 1) * rows // 2 - (-stops // tile)
    return tiles * tile**2


def _count_window(starts: Ints, stops: Ints, rows: Ints, tile: int, window: int) -> Ints:
    piece = np.repeat(np.arange(len(rows)), rows)
    ends_at = np.cumsum(rows)
    row = np.arange(len(piece)) - (ends_at - rows)[piece]
    first_query = starts[piece] + tile * row
    last_query = np.minimum(first_query + tile, stops[piece]) - 1
    first_tile = np.maximum(first_query - window + 1, 0) // tile
    tiles = np.concatenate(([0], np.cumsum(last_query // tile - first_tile + 1)))
    counted: Ints = (tiles[ends_at] - tiles[ends_at - rows]) * tile**2
    return counted
