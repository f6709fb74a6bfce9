"""Check an attention schedule's tiles: a kernel can run each, and every pair is in exactly one.

What it decides
    Queries are cut into cells wherever a tile begins or ends or the mask changes. Within a
    cell, the keys that a tile or the mask reads begin and end at positions that are fixed or
    move by one key per query::

        query 4   . . . [ a a c )         anticausal  [ moves, ) stands
              5   . . . . [ a c c )       causal      [ stands, ) moves

    A tile adds one to the read count at its beginning and subtracts it at its end. Tiles read
    each pair as often as the mask does if and only if their beginnings and ends cancel with the
    mask's, cell by cell; no pair is visited.

Kept true (tests/unit/schedule/attention/test_check.py, by Hypothesis)
    It agrees with counting every pair of small documents.
"""

from collections.abc import Iterator

import numpy as np

from equipoise.schedule.attention.mask import Reads, reads_of
from equipoise.schedule.attention.runs import join_runs, meet_runs
from equipoise.schedule.attention.schedule import TILE_KINDS, AttentionSchedule, Tiles, write_tile
from equipoise.spec.pack import Pieces


def tile_faults(schedule: AttentionSchedule) -> Iterator[str]:
    """Yield tiles that no kernel computes."""
    ratio = schedule.heads // schedule.kv_heads
    lengths = schedule.doc_tokens
    for rank, at, each in schedule:
        if not len(each.tiles):
            continue
        document, q0, q1, k0, k1, kind, h0, h1 = each.tiles.T
        known = (document >= 0) & (document < len(lengths))
        ends = lengths[np.where(known, document, 0)] if len(lengths) else 0 * document
        is_inside = known & (q0 >= 0) & (q0 < q1) & (q1 <= ends) & (k0 >= 0) & (k0 < k1)
        is_inside &= k1 <= ends
        is_kind = (kind >= 0) & (kind < len(TILE_KINDS))
        is_square = (kind == 0) | (q1 - q0 == k1 - k0)
        whole = (h0 % ratio == 0) & (h1 % ratio == 0)
        is_block = (h0 >= 0) & (h0 < h1) & (h1 <= schedule.heads)
        is_block &= whole | (h0 // ratio == (h1 - 1) // ratio)
        for good, why in (
            (is_inside, "lies outside its document"),
            (is_kind, f"is neither {', '.join(TILE_KINDS[:-1])} nor {TILE_KINDS[-1]}"),
            (is_square, "is not square"),
            (is_block, "has heads that are neither whole groups nor part of one"),
        ):
            for wrong in np.flatnonzero(~good)[:1]:
                what = write_tile(each.tiles[wrong])
                yield f"Rank {rank} computes in round {at} {what}: it {why}."
                return


def coverage_faults(schedule: AttentionSchedule) -> Iterator[str]:
    """Yield pairs that are missing, computed twice, or outside the mask."""
    parts = [each.tiles for _, _, each in schedule if len(each.tiles)]
    tiles = np.concatenate([np.empty((0, 8), dtype=np.int64), *parts])
    reads = reads_of(schedule.masks, schedule.doc_tokens)
    computed, wanted = _strips_of(tiles), _strips_wanted(reads, schedule.heads)
    if schedule.cached:
        wanted = _cut_strips(wanted, join_runs(*schedule.home))
    for document, first, last in _wrong_cells(computed, wanted):
        for query in (first, last):
            for key, head, times, right in _wrong_keys(
                _at(computed, document, query), _at(wanted, document, query)
            ):
                yield (
                    f"In document {document} query {query} reads key {key} in head {head} "
                    f"{times} times instead of {'once' if right else 'never'}."
                )
                return


_Strips = Pieces
"""int64 [n, 9]: document, first query, query stop, of the first query the first key and key
stop, how far each of the two moves a query, first head, head stop."""


def _strips_of(tiles: Tiles) -> _Strips:
    document, q0, q1, k0, k1, kind, h0, h1 = tiles.T
    is_causal, is_anti = kind == 1, kind == 2
    ends = np.where(is_causal, k0 + 1, k1)
    return np.stack((document, q0, q1, k0, ends, 1 * is_anti, 1 * is_causal, h0, h1), axis=1)


def _strips_wanted(reads: Reads, heads: int) -> _Strips:
    document, start, stop, window = reads.own.T
    turn = np.minimum(start + window - 1, stop)  # from here on the window drops its oldest keys
    zero, one = np.zeros_like(start), np.ones_like(start)
    growing = (document, start, turn, start, start + 1, zero, one, zero, zero + heads)
    moving = (document, turn, stop, turn - window + 1, turn + 1, one, one, zero, zero + heads)
    document, start, stop, shared = reads.shared.T
    zero = np.zeros_like(start)
    still = (document, start, stop, zero, shared, zero, zero, zero, zero + heads)
    strips = np.concatenate([np.stack(part, axis=1) for part in (growing, moving, still)])
    return strips[strips[:, 1] < strips[:, 2]]


def _cut_strips(strips: _Strips, queries: Pieces) -> _Strips:
    """The parts of some strips that these queries read; runs are disjoint and in order."""
    strip, run = meet_runs(strips, queries)
    cut = strips[strip]
    cut[:, 1] = np.maximum(cut[:, 1], queries[run, 1])
    cut[:, 2] = np.minimum(cut[:, 2], queries[run, 2])
    cut[:, 3:5] += cut[:, 5:7] * (cut[:, 1] - strips[strip, 1])[:, None]
    return cut


def _at(strips: _Strips, document: int, query: int) -> Pieces:
    """What a query reads, int64 [n, 4]: first key, key stop, first head, head stop."""
    rows = strips[(strips[:, 0] == document) & (strips[:, 1] <= query) & (query < strips[:, 2])]
    moved = query - rows[:, 1]
    low, high = rows[:, 3] + moved * rows[:, 5], rows[:, 4] + moved * rows[:, 6]
    return np.stack((low, high, rows[:, 7], rows[:, 8]), axis=1)


def _wrong_keys(computed: Pieces, wanted: Pieces) -> Iterator[tuple[int, int, int, int]]:
    """The first key and head that a query reads too often or not often enough."""
    size = np.concatenate((computed, wanted)).max(axis=0, initial=0)
    times, right = (np.zeros((size[1], size[3]), dtype=np.int64) for _ in range(2))
    for counts, rows in ((times, computed), (right, wanted)):
        for low, high, h0, h1 in rows.tolist():
            counts[low:high, h0:h1] += 1
    for key, head in np.argwhere(times != right)[:1].tolist():
        yield key, head, int(times[key, head]), int(right[key, head])


def _wrong_cells(computed: _Strips, wanted: _Strips) -> Iterator[tuple[int, int, int]]:
    """Document, first and last query of the first cell whose beginnings and ends do not cancel.

    If they cancel for the first and the last query, they do for all between: each is fixed or
    moves with the query, and two that differ at the first never meet again.
    """
    strips = np.concatenate((computed, wanted))
    if not len(strips):
        return
    sign = np.repeat((1, -1), (len(computed), len(wanted)))
    span = int(strips[:, 1:5].max()) + 1
    first, stop = strips[:, 0] * span + strips[:, 1], strips[:, 0] * span + strips[:, 2]
    cuts = np.unique(np.concatenate((first, stop)))
    begin, end = np.searchsorted(cuts, first), np.searchsorted(cuts, stop)
    cells = end - begin
    of = np.repeat(np.arange(len(strips)), cells)
    cell = np.arange(len(of)) - np.repeat(np.cumsum(cells) - cells - begin, cells)
    moved = cuts[cell] - first[of]
    is_many = cuts[cell + 1] - cuts[cell] > 1
    events = []
    for place, move, side in ((3, 5, 1), (4, 6, -1)):
        key = strips[of, place] + moved * strips[of, move]
        name = (cell * (span + 1) + key) * 2 + is_many * strips[of, move]
        events += [(name, strips[of, head], sign[of] * side * s) for head, s in ((7, 1), (8, -1))]
    names, heads, signs = (np.concatenate(column) for column in zip(*events, strict=True))
    name = names * (int(strips[:, 8].max()) + 1) + heads
    order = np.argsort(name, kind="stable")
    name, begins = np.unique(name[order], return_index=True)
    sums = np.add.reduceat(signs[order], begins)
    for wrong in np.flatnonzero(sums)[:1].tolist():
        place = int(names[order][begins[wrong]]) // (2 * (span + 1))
        document, query = divmod(int(cuts[place]), span)
        yield document, query, int(cuts[place + 1]) - document * span - 1
