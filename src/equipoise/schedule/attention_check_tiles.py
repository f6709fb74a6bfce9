"""Tiles of an attention schedule: each one a kernel's, and every causal pair in exactly one.

What it decides
    Pairs are counted in cells: a document is cut wherever a tile begins or ends, so that all
    pairs of a cell are in the same tiles. Cells below the diagonal must be in one full tile,
    or below the diagonal of one causal tile; cells on it on the diagonal of one causal tile.

Kept true (tests/unit/schedule/test_attention_check.py, by Hypothesis)
    It agrees with counting every pair of small documents one by one.
"""

from collections.abc import Iterator

import numpy as np

from equipoise.schedule.attention import AttentionSchedule, Tiles, write_tile


def tile_faults(schedule: AttentionSchedule) -> Iterator[str]:
    """Tiles that no kernel computes."""
    ratio = schedule.heads // schedule.kv_heads
    lengths = schedule.doc_tokens
    for rank, at, each in schedule:
        if not len(each.tiles):
            continue
        document, q0, q1, k0, k1, is_causal, h0, h1 = each.tiles.T
        known = (document >= 0) & (document < len(lengths))
        ends = lengths[np.where(known, document, 0)] if len(lengths) else 0 * document
        is_inside = known & (q0 >= 0) & (q0 < q1) & (q1 <= ends) & (k0 >= 0) & (k0 < k1)
        is_inside &= k1 <= ends
        is_masked = np.where(is_causal == 1, (q0 == k0) & (q1 == k1), k1 <= q0)
        whole = (h0 % ratio == 0) & (h1 % ratio == 0)
        is_block = (h0 >= 0) & (h0 < h1) & (h1 <= schedule.heads)
        is_block &= whole | (h0 // ratio == (h1 - 1) // ratio)
        for good, why in (
            (is_inside, "lies outside its document"),
            (is_masked, "is neither all read nor the square of one run"),
            (is_block, "has heads that are neither whole groups nor within one"),
        ):
            for wrong in np.flatnonzero(~good)[:1]:
                what = write_tile(each.tiles[wrong])
                yield f"Rank {rank} computes in round {at} {what}: it {why}."
                return


def coverage_faults(schedule: AttentionSchedule) -> Iterator[str]:
    """Pairs that are computed never, or twice."""
    parts = [each.tiles for _, _, each in schedule if len(each.tiles)]
    tiles = np.concatenate([np.empty((0, 8), dtype=np.int64), *parts])
    tiles = tiles[np.argsort(tiles[:, 0], kind="stable")]
    bounds = np.searchsorted(tiles[:, 0], np.arange(len(schedule.doc_tokens) + 1))
    for document, tokens in enumerate(schedule.doc_tokens.tolist()):
        if not tokens:
            continue
        mine = tiles[bounds[document] : bounds[document + 1]]
        for query, key, head, times in _wrong_pairs(mine, tokens, schedule.heads):
            yield (
                f"In document {document} query {query} reads key {key} in head {head} {times} "
                f"times instead of once."
            )
            return


def _wrong_pairs(tiles: Tiles, tokens: int, heads: int) -> Iterator[tuple[int, int, int, int]]:
    cuts = np.unique(np.append(tiles[:, 1:5], (0, tokens)))
    head_cuts = np.unique(np.append(tiles[:, 6:8], (0, heads)))
    q0, q1, k0, k1 = (np.searchsorted(cuts, tiles[:, column]) for column in (1, 2, 3, 4))
    h0, h1 = (np.searchsorted(head_cuts, tiles[:, column]) for column in (6, 7))
    cells, blocks = len(cuts) - 1, len(head_cuts) - 1
    # One row of cells of queries at a time: +1 where a tile's keys begin, -1 where they end.
    rows = q1 - q0
    tile = np.repeat(np.arange(len(tiles)), rows)
    row = np.arange(len(tile)) - np.repeat(np.cumsum(rows) - rows - q0, rows)
    is_causal = tiles[tile, 5] == 1
    stop = np.where(is_causal, row, k1[tile])
    edges = np.zeros((cells, cells + 1, blocks + 1), dtype=np.int32)
    for at, sign in ((k0[tile], 1), (stop, -1)):
        np.add.at(edges, (row, at, h0[tile]), sign)
        np.add.at(edges, (row, at, h1[tile]), -sign)
    found = edges.cumsum(axis=1).cumsum(axis=2)[:, :cells, :blocks]
    squares = np.zeros((cells, blocks + 1), dtype=np.int32)
    np.add.at(squares, (row[is_causal], h0[tile][is_causal]), 1)
    np.add.at(squares, (row[is_causal], h1[tile][is_causal]), -1)
    found[np.arange(cells), np.arange(cells)] += squares.cumsum(axis=1)[:, :blocks]
    wanted = np.tri(cells, dtype=np.int32)[:, :, None]
    for i, j, block in np.argwhere(found != wanted)[:1].tolist():
        yield int(cuts[i]), int(cuts[j]), int(head_cuts[block]), int(found[i, j, block])
