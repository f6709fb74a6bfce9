"""Mixed context sharding: light documents whole, heavy ones cut where no tile is lost.

Why
    Cutting every document sends its keys to every rank and wastes part of a tile at every cut.
    Few cuts suffice: a rank that takes some documents whole needs only one part of one long
    document to come out even in both tokens and pairs.

What it decides
    Documents are laid out in a line, the light ones first and the heaviest last, in blocks of
    one tile. Rank after rank takes a run from the left end and a run from the right end::

        light documents   heavy ones
        a b b c d d e f f g g g g g h h h h h h h h h h
        0 0 0 0 0 0 . . . . . . . . . . . . . . . . 0 0     rank 0: 6 blocks and 2
        / / / / / / 1 1 1 1 1 . . . . . . . . 1 1 1 / /     rank 1: 5 blocks and 3
        / / / / / / / / / / / 2 2 2 2 2 2 2 2 / / / / /     the last rank: what is left

    Blocks on the left have few keys and blocks on the right many, so one block more from the
    left and one less from the right keeps the tokens and lowers the work. Among the pairs of
    runs with the wanted tokens, one has the wanted work to within one block. If that is too
    coarse, the last block of the right run is swapped for one further down its document. If
    the ends of the line no longer bracket the wanted work, the rest is laid out again.

    Most documents stay whole, since a run covers many. A document is cut only where a run ends:
    two cuts a rank, or four after a swap. Cuts lie on multiples of the tile, counted from the
    document's start, so the parts together have the tiles of the whole.

    Work is tile pairs, which is what a kernel computes; with many ranks it is the mean of tile
    pairs and exact pairs. If whole tiles leave ranks further from equal tokens than the slack,
    the lightest blocks are held back and dealt out token by token. If ranks are still uneven,
    they exchange blocks, and blocks dealt by work and evened out alike are compared (``even``).
    If no document is longer than a rank's share, blocks of half a tile or less are compared
    too; ranks with less than two tiles have only these.

Kept true (tests/unit/balance/context/test_sharding.py, tests/unit/balance/context/test_mixed.py)
    Each token has one owner; a rank's tokens differ from the mean by at most the slack and one
    token; where a tile is within the slack, ranks together touch only the tiles of the whole
    documents; the answer does not depend on the order of documents.

Sources
    Cutting long documents and keeping short ones whole: WLB-LLM, arXiv:2503.17924, section 8.
    The line and its two ends are this package's own.
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
"""A rank may miss its work by ``1 / _EXACT`` before one of its blocks is swapped."""

_EVEN_ENOUGH = 32
"""A line is kept while no rank has more than ``1 / _EVEN_ENOUGH`` tiles above the mean."""

_OPTIONS = 6
"""Pairs of runs tried for a rank, nearest to its work first."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """Runs ``first:end`` and ``start:stop``, minus block ``given``, plus block ``gained``."""

    miss: int
    """By how much their work misses the target."""
    end: int
    start: int
    given: int = -1
    gained: int = -1


def mixed(request: ContextRequest) -> Rows:
    """Balance tokens and pairs at once, with few cuts.

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
    if not _is_within_slack(rows, request):
        rows = deal_spare(rows, rows[:0], request)
    rows[:, 1] = order[rows[:, 1]]
    return rows


def _is_within_slack(rows: Rows, request: ContextRequest) -> bool:
    """Whether no rank's tokens differ from the mean by more than the slack and one token."""
    tokens = np.bincount(rows[:, 0], rows[:, 3] - rows[:, 2], request.ranks)
    mean = request.tokens / request.ranks
    return bool(np.abs(tokens - mean).max() <= request.token_slack * mean + 1)


def _in_tiles(request: ContextRequest) -> Rows:
    """Deal blocks of a tile, then even out what they leave uneven."""
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
    """The most tiles of any rank, and the number of pieces."""
    return int(rank_tile_pairs(rows, request).max()), len(join_rows(rows))


def _deal(request: ContextRequest, grain: int, spare: int) -> tuple[Rows, Rows]:
    """Blocks with their ranks, and the blocks held back."""
    line, kept_back = lay_out(request, grain, spare)
    total = int(line.tokens_before[-1])
    for rank in range(request.ranks - 1):
        rest = total * (request.ranks - 1 - rank) // request.ranks
        _take(line, rank, request.ranks - rank, rest, grain)
    left = line.owner[line.first : line.stop]
    left[left < 0] = request.ranks - 1
    return blocks_of(line, grain), kept_back


def _options(line: Line, tokens: int, work: int, grain: int) -> tuple[Ints, Ints]:
    """Pairs of runs with the wanted tokens, to within half a grain.

    Returns:
        Where the right run starts if the left one has as many blocks as the index; and by how
        much the pair's work exceeds ``work``.
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
    """Give ``rank`` a run from each end, leaving about ``rest`` tokens and equal work."""
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
    """The option as it is, or with one block of its right run swapped for one of less work.

    Tries the innermost block against one further down its document, else the block of most
    work against any.
    """
    end, stop = line.first + blocks, line.stop
    while start < stop and start in line.taken:
        start += 1
    choice = _Choice(abs(excess), end, start)
    if excess <= allowed or start == stop:
        return choice
    given, gained, miss = _step_down(line, end, start, excess)
    if miss > allowed:
        # At most as many blocks lie further down the document as its number, right next to it.
        low = max(end, start - int(line.row[start]))
        given, gained, miss = _exchange(line, low, start, start, excess)
    if miss > allowed:
        free = line.work[start:stop] * (line.owner[start:stop] < 0)
        other = _exchange(line, end, start, start + int(free.argmax()), excess)
        given, gained, miss = other if other[2] < miss else (given, gained, miss)
    return _Choice(miss, end, start, given, gained) if miss < choice.miss else choice


def _step_down(line: Line, end: int, start: int, excess: int) -> tuple[int, int, int]:
    """``_exchange`` for adjacent blocks of one document, none of them taken."""
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
    """Block ``given``, the block of ``low:start`` nearest to ``excess`` below it, and the miss."""
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
    """Assign the chosen blocks to the rank, and shorten the line."""
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
