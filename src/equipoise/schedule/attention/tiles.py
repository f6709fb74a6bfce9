"""The tiles between runs of queries and keys under their masks, and the keys that are read.

Why
    Kernels compute rectangles and triangles. Every mask is made of them, whatever the runs of
    queries and keys, so no kernel needs an explicit mask and every row of a tile has a key.

What it decides
    Query runs are cut where their mask changes, and under a window into runs of at most the
    window. Such a run and its own keys up to the window's width before it::

        window 4, queries 4:8         keys inside the run      the square of both: causal
                                      keys before the run      a square that reads from its
        keys      1 2 3 4 5 6 7                                diagonal on: anticausal
        query 4   a a a c             others                   full
              5     a a c c
              6       a c c c
              7         c c c c

    Keys that lie only partly before or inside the run cut squares into smaller ones and
    rectangles. A query run's tiles are consecutive, causal ones first: they write a fresh
    output, and the others merge into it. Runs are in order of (document, start).

Kept true (tests/unit/schedule/attention/test_tiles.py, by Hypothesis)
    Tiles between any runs cover exactly the mask's pairs between them, each once; keys read
    are those of some pair.
"""

import numpy as np

from equipoise.schedule.attention.mask import Reads
from equipoise.schedule.attention.runs import NO_RUNS, join_runs, meet_runs
from equipoise.schedule.attention.schedule import TILE_COLUMNS, Tiles
from equipoise.spec.pack import Pieces

FULL, CAUSAL_SQUARE, ANTICAUSAL_SQUARE = 0, 1, 2


def tiles_between(
    queries: Pieces, keys: Pieces, blocks: list[tuple[int, int]], reads: Reads
) -> Tiles:
    """Tiles of the pairs between query runs and key runs.

    Args:
        queries: Disjoint runs, int64 [n, 3].
        keys: Disjoint runs, int64 [m, 3], in order of (document, start).
        blocks: Query heads of each tile, one tile per block.
        reads: Which keys queries read.

    Returns:
        Tiles int64 [k, 8].

    Cost: O(n log m) and what is returned: of a window's queries, 2 for each window's length.

    >>> from equipoise.schedule.attention.mask import reads_of
    >>> from equipoise.spec.mask import Mask
    >>> reads = reads_of([Mask("window", 2)], np.array([4]))
    >>> tiles_between(np.array([[0, 2, 4]]), np.array([[0, 0, 4]]), [(0, 1)], reads).tolist()
    [[0, 2, 4, 2, 4, 1, 0, 1], [0, 2, 3, 1, 2, 2, 0, 1]]
    """
    if not len(queries) or not len(keys) or not blocks:
        return np.empty((0, TILE_COLUMNS), dtype=np.int64)
    tiles, query = _own_tiles(queries, keys, reads)
    if len(reads.shared):
        shared, of_shared = _shared_tiles(queries, keys, reads)
        tiles, query = np.concatenate((tiles, shared)), np.concatenate((query, of_shared))
    kept = (tiles[:, 1] < tiles[:, 2]) & (tiles[:, 3] < tiles[:, 4])
    tiles, query = tiles[kept], query[kept]
    order = np.lexsort((tiles[:, 3], tiles[:, 1], tiles[:, 5] != CAUSAL_SQUARE, query))
    rows = np.repeat(tiles[order], len(blocks), axis=0)
    return np.concatenate((rows, np.tile(np.array(blocks), (len(order), 1))), axis=1)


def _own_tiles(queries: Pieces, keys: Pieces, reads: Reads) -> tuple[Pieces, Pieces]:
    """Tiles without heads, some empty, and the query run of each."""
    query, row = meet_runs(queries, reads.own)
    document, start, stop, window = reads.own[row].T
    q0, q1 = np.maximum(queries[query, 1], start), np.minimum(queries[query, 2], stop)
    is_cut = (window <= stop - start).any()
    if is_cut:  # pieces of a window each
        first, end, pieces = q0, q1, -(-(q1 - q0) // window)
        of = np.repeat(np.arange(len(query)), pieces)
        turn = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        query, document, start, window = query[of], document[of], start[of], window[of]
        q0 = first[of] + turn * window
        q1 = np.minimum(q0 + window, end[of])

    oldest = np.maximum(start, q0 - window + 1)
    piece, key = meet_runs(np.stack((document, oldest, q1), axis=1), keys)
    query, document, window = query[piece], document[piece], window[piece]
    q0, q1 = q0[piece], q1[piece]
    low, high = np.maximum(keys[key, 1], oldest[piece]), np.minimum(keys[key, 2], q1)

    # Keys before the queries, low:edge; and among the queries, inner:high.
    edge, inner = np.minimum(high, q0), np.maximum(low, q0)
    full, square, anti = (
        np.full_like(q0, each) for each in (FULL, CAUSAL_SQUARE, ANTICAUSAL_SQUARE)
    )
    parts = [
        (document, inner, high, inner, high, square),
        (document, np.maximum(high, q0), q1, inner, high, full),
    ]
    if is_cut:  # query i reads keys from i - window + 1 on
        late, last = (np.clip(at + window - 1, q0, q1) for at in (low, edge))
        since, until = late - window + 1, last - window + 1
        is_before = low < edge
        parts += [
            (document, q0, np.where(is_before, late, q0), low, edge, full),
            (document, late, np.where(is_before, last, late), since, until, anti),
            (document, late, np.where(is_before, last, late), until, edge, full),
        ]
    else:
        parts += [(document, q0, q1, low, edge, full)]
    columns = zip(*parts, strict=True)
    rows = np.stack([np.concatenate(column) for column in columns], axis=1)
    return rows, np.tile(query, len(parts))


def _shared_tiles(queries: Pieces, keys: Pieces, reads: Reads) -> tuple[Pieces, Pieces]:
    query, row = meet_runs(queries, reads.shared)
    document, start, stop, shared = reads.shared[row].T
    q0, q1 = np.maximum(queries[query, 1], start), np.minimum(queries[query, 2], stop)
    piece, key = meet_runs(np.stack((document, 0 * shared, shared), axis=1), keys)
    ends = np.minimum(keys[key, 2], shared[piece])
    full = np.full_like(ends, FULL)
    part = (document[piece], q0[piece], q1[piece], keys[key, 1], ends, full)
    return np.stack(part, axis=1), query[piece]


def runs_read(queries: Pieces, reads: Reads) -> Pieces:
    """Keys that some query of ``queries`` reads, whoever holds them: disjoint runs, in order.

    >>> from equipoise.schedule.attention.mask import reads_of
    >>> from equipoise.spec.mask import Mask
    >>> reads = reads_of([Mask(), Mask("window", 2)], np.array([9, 9]))
    >>> runs_read(np.array([[0, 4, 6], [1, 4, 6]]), reads).tolist()
    [[0, 0, 6], [1, 3, 6]]
    """
    if not len(queries):
        return NO_RUNS
    query, row = meet_runs(queries, reads.own)
    document, start, stop, window = reads.own[row].T
    first, end = np.maximum(queries[query, 1], start), np.minimum(queries[query, 2], stop)
    own = np.stack((document, np.maximum(start, first - window + 1), end), axis=1)
    if not len(reads.shared):
        return join_runs(own)
    _, row = meet_runs(queries, reads.shared)
    document, _, _, shared = reads.shared[row].T
    return join_runs(own, np.stack((document, 0 * shared, shared), axis=1))
