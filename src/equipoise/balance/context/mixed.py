"""Mixed context sharding: light documents whole, heavy ones cut where no tile is lost.

Why
    To cut every document is to send every document's keys to every rank, and to waste a part
    of a tile at every cut. Few cuts are enough: a rank that takes some documents whole needs
    one part of one long document to come out even in tokens and in pairs, both.

What it decides
    Documents are laid out in a line, the light ones first and the heaviest last, in blocks of
    one tile. Rank after rank takes a run from the left end and a run from the right end::

        light documents   heavy ones
        a b b c d d e f f g g g g g h h h h h h h h h h
        0 0 0 0 0 0 . . . . . . . . . . . . . . . . 0 0     rank 0: 6 blocks and 2
        / / / / / / 1 1 1 1 1 . . . . . . . . 1 1 1 / /     rank 1: 5 blocks and 3
        / / / / / / / / / / / 2 2 2 2 2 2 2 2 / / / / /     the last rank: what is left

    Blocks on the left have few keys and on the right many: one block more from the left and
    one less from the right is as many tokens, and less work. So among the pairs of runs that
    have the wanted tokens, one has the wanted work, but for a step between two blocks. Where
    that step is too coarse, the last block of the right run is changed for one further down
    its document. Where the ends of the line no longer bracket the wanted work, what is left
    of it is laid out again.

    Most documents stay whole, since a run covers many; a document is cut only where a run
    ends: two cuts a rank, or four where a block is changed. A cut lies on a multiple of the
    tile, counted from the document's own start, so the parts have the tiles of the whole.

    Work is tile pairs, which is what a kernel computes, and over many ranks the mean of tile
    pairs and exact pairs. Where whole tiles leave ranks further from equal tokens than the
    slack, the lightest blocks are kept back and dealt out to the token; where ranks are then still
    uneven, they exchange blocks; and where that is not enough, blocks dealt by work, evened out
    likewise, are compared (``context_even``). Where no document is longer than a rank's share,
    blocks of a half tile or less are compared, too; ranks of less than two tiles have only these.

Kept true (tests/unit/balance/context/test_sharding.py, tests/unit/balance/context/test_mixed.py)
    Each token once; tokens of a rank differ from the mean by at most the slack and one token;
    where a tile is within the slack, ranks together touch the tiles of whole documents and no
    more; the answer does not depend on the order in which documents stand.

Sources
    Long documents cut and short ones whole, as a thing to do: WLB-LLM, arXiv:2503.17924,
    section 8. The line and its two ends are this package's own.
"""

from dataclasses import dataclass, replace

import numpy as np

from equipoise.balance.context.even import deal_spare, even_out, is_even, rank_tile_pairs
from equipoise.balance.context.fixed import by_work
from equipoise.balance.context.line import (
    Line,
    blocks_of,
    grain_of,
    holds_tiles,
    lay_out,
    lay_out_again,
    spare_blocks,
)
from equipoise.balance.context.split import ContextRequest, Rows, join_rows
from equipoise.base.arrays import Ints

_EXACT = 512
"""A rank may miss its work by one part in so many before a block is changed for another."""

_EVEN_ENOUGH = 32
"""A line is not kept as it is once a rank has 1/N more tiles than the mean, N being this."""

_OPTIONS = 6
"""Pairs of runs that are tried for a rank, the nearest to its work first."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """Runs ``first:end`` and ``start:stop``, less block ``given``, plus block ``gained``."""

    miss: int
    """By how much their work is off."""
    end: int
    start: int
    given: int = -1
    gained: int = -1


def mixed(request: ContextRequest) -> Rows:
    """Share out by tokens and by pairs at once, with few cuts.

    Cost: O(blocks + ranks x blocks of a rank).

    >>> from equipoise.balance.context.split import join_rows
    >>> request = ContextRequest(np.array([512, 128, 128, 256]), 2, token_slack=0.25)
    >>> join_rows(mixed(request)).tolist()
    [[0, 0, 384, 512], [0, 1, 0, 128], [0, 3, 0, 256], [1, 0, 0, 384], [1, 2, 0, 128]]
    """
    if not request.tokens:
        return np.zeros((0, 4), dtype=np.int64)
    # By length, so that ties between documents do not depend on where they stand.
    order = np.lexsort((np.arange(len(request.doc_tokens)), request.doc_tokens))
    request = replace(request, doc_tokens=request.doc_tokens[order])
    rows = _in_tiles(request) if holds_tiles(request) else _deal(request, grain_of(request), 0)[0]
    rows[:, 1] = order[rows[:, 1]]
    return rows


def _in_tiles(request: ContextRequest) -> Rows:
    """Blocks of a tile, and where these leave ranks uneven, what evens them out."""
    rows, _ = _deal(request, request.tile, 0)
    spare = spare_blocks(request)
    if not spare:
        is_close = is_even(rank_tile_pairs(rows, request), parts=_EVEN_ENOUGH)
        return rows if is_close else even_out(rows, request)
    slack = request.token_slack * request.tokens / request.ranks
    tokens = np.bincount(rows[:, 0], rows[:, 3] - rows[:, 2], request.ranks)
    if np.ptp(tokens) > slack:
        rows, kept_back = _deal(request, request.tile, spare)
        rows = deal_spare(rows, kept_back, request)
    tried = [even_out(rows, request)]
    if request.doc_tokens.max() <= request.tokens / request.ranks + slack:
        # Finer blocks may leave all documents whole.
        tried.append(_deal(request, grain_of(request), 0)[0])
    if not is_even(rank_tile_pairs(tried[0], request), parts=_EVEN_ENOUGH):
        tried.append(even_out(deal_spare(by_work(request), rows[:0], request), request))
    return min(tried, key=lambda each: _judge(each, request))


def _judge(rows: Rows, request: ContextRequest) -> tuple[int, int]:
    """Most tiles of a rank, and pieces."""
    return int(rank_tile_pairs(rows, request).max()), len(join_rows(rows))


def _deal(request: ContextRequest, grain: int, spare: int) -> tuple[Rows, Rows]:
    """Blocks with their ranks, and those that were kept back."""
    line, kept_back = lay_out(request, grain, spare)
    total = int(line.tokens_before[-1])
    for rank in range(request.ranks - 1):
        rest = total * (request.ranks - 1 - rank) // request.ranks
        _take(line, rank, request.ranks - rank, rest, grain)
    left = line.owner[line.first : line.stop]
    left[left < 0] = request.ranks - 1
    return blocks_of(line, grain), kept_back


def _options(line: Line, tokens: int, work: int, grain: int) -> tuple[Ints, Ints]:
    """Pairs of runs with the wanted tokens, to half a grain.

    Returns:
        Of each: where the right run starts, the left one being as many blocks as its index;
        and by how much their work exceeds ``work``.
    """
    first, stop = line.first, line.stop
    half = grain // 2
    low, high = int(line.tokens_before[first]), int(line.tokens_before[stop])
    most = min(int(line.tokens_before.searchsorted(low + tokens + half, side="right")), stop + 1)
    left = line.tokens_before[first:most]
    starts = line.tokens_before.searchsorted(left + (high - low - tokens - half))
    starts = np.clip(starts, np.arange(first, most), stop)
    besides = int(line.work_before[stop]) - int(line.work_before[first]) - work
    excess: Ints = line.work_before[first:most] - line.work_before[starts] + besides
    return starts, excess


def _take(line: Line, rank: int, ranks_left: int, rest: int, grain: int) -> None:
    """Give ``rank`` a run from either end, leaving about ``rest`` tokens and equal work."""
    tokens = int(line.tokens_before[line.stop]) - int(line.tokens_before[line.first]) - rest
    if tokens <= 0:
        return
    work = int(line.work_before[line.stop] - line.work_before[line.first]) // ranks_left
    starts, excess = _options(line, tokens, work, grain)
    if excess[0] < 0 or excess[-1] > 0:  # right runs alone too light, or left ones too heavy
        lay_out_again(line)
        starts, excess = _options(line, tokens, work, grain)
    allowed = work // _EXACT
    unsigned = excess.view(np.uint64)  # those below 0 come last
    option = int(unsigned.argmin())
    best = _choose(line, option, int(starts[option]), int(excess[option]), allowed)
    if best.miss > allowed:
        for option in unsigned.argsort(kind="stable")[1:_OPTIONS].tolist():
            choice = _choose(line, option, int(starts[option]), int(excess[option]), allowed)
            if choice.miss < best.miss:
                best = choice
    _give(line, rank, best)


def _choose(line: Line, blocks: int, start: int, excess: int, allowed: int) -> _Choice:
    """The option itself, or with one block of its right run changed for one of less work.

    First the innermost block for one further down its document; where there is none, the
    block of most work for any.
    """
    end, stop = line.first + blocks, line.stop
    while start < stop and start in line.taken:
        start += 1
    choice = _Choice(abs(excess), end, start)
    if excess <= allowed or start == stop:
        return choice
    given, gained, miss = _step_down(line, end, start, excess)
    if miss > allowed:
        # Blocks further down its document are at most as many as its number, and next to it.
        low = max(end, start - int(line.row[start]))
        given, gained, miss = _exchange(line, low, start, start, excess)
    if miss > allowed:
        free = line.work[start:stop] * (line.owner[start:stop] < 0)
        other = _exchange(line, end, start, start + int(free.argmax()), excess)
        given, gained, miss = other if other[2] < miss else (given, gained, miss)
    return _Choice(miss, end, start, given, gained) if miss < choice.miss else choice


def _step_down(line: Line, end: int, start: int, excess: int) -> tuple[int, int, int]:
    """As ``_exchange``, where blocks of one document stand side by side and none was taken."""
    step = int(line.work[start]) - int(line.work[start - 1]) if start > end else 0
    place = start - (2 * excess + step) // (2 * step) if step > 0 else -1
    if (
        place < end
        or place in line.taken
        or line.document[place] != line.document[start]
        or line.tokens[place] != line.tokens[start]
    ):
        return -1, -1, excess
    return start, place, abs(int(line.work[start]) - int(line.work[place]) - excess)


def _exchange(line: Line, low: int, start: int, given: int, excess: int) -> tuple[int, int, int]:
    """Block ``given``, the one among ``low:start`` nearest to ``excess`` less, and the miss."""
    is_fit = (line.owner[low:start] < 0) & (line.tokens[low:start] == line.tokens[given])
    if given == start:
        is_fit &= line.document[low:start] == line.document[given]
    fits = is_fit.nonzero()[0]
    if not len(fits):
        return -1, -1, excess
    misses = np.abs(line.work[low:start][fits] - (int(line.work[given]) - excess))
    at = int(misses.argmin())
    return given, low + int(fits[at]), int(misses[at])


def _give(line: Line, rank: int, choice: _Choice) -> None:
    """Write the rank's name on its blocks, and shorten the line."""
    start, given, gained = choice.start, choice.given, choice.gained
    line.owner[line.first : choice.end] = rank
    line.owner[start : line.stop] = rank
    for place, taker in line.taken.items():
        line.owner[place] = taker
    if gained >= 0:
        line.owner[gained], line.owner[given] = rank, -1
        line.taken[gained] = rank
        line.tokens_before[gained + 1 : start + 1] -= line.tokens[gained]
        line.work_before[gained + 1 : start + 1] -= line.work[gained]
        if given != start:
            for values in (line.document, line.row, line.tokens, line.work, line.owner):
                values[start], values[given] = values[given], values[start]
        line.tokens_before[start + 1] = line.tokens_before[start] + line.tokens[start]
        line.work_before[start + 1] = line.work_before[start] + line.work[start]
        start += 1
    line.first, line.stop = choice.end, start
