"""The line in which mixed context sharding lays out a micro-batch's blocks.

What it decides
    The order: light documents first, in an even mixture of lengths, then heavy ones, heaviest
    last. A document is heavy if its tokens have more pairs than the mean token. Light ones are
    mixed so that every rank gets some of each length: short documents waste more of their
    tiles, and many cost a kernel more than few.

Kept true (tests/unit/balance/context/test_mixed.py)
    Sums before each place are those of the blocks that are left.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.balance.context.split import ContextRequest, Rows
from equipoise.balance.tiles import count_tile_pairs
from equipoise.base.arrays import Ints
from equipoise.cost.work import pairs_before, slice_pairs

_GOLDEN = 2_654_435_769
"""2**32 over the golden ratio: multiples of it, modulo 2**32, are spread evenly."""

_FEW_RANKS = 4
"""Up to this many ranks only tiles are balanced; beyond it, the mean of tiles and exact pairs.

A rank that holds no document's last tile wastes less than others, so equal tiles give it more
pairs: 0.5% over 4 ranks and 1.3% over 8, on packs of 128K tokens of the embedded
distributions."""


@dataclass(slots=True)
class Line:
    """Blocks in a line; those not yet taken lie in ``first:stop``."""

    document: Ints
    row: Ints
    """Number of the block in its document."""
    tokens: Ints
    work: Ints
    owner: Ints
    """Rank that took the block, or -1."""
    tokens_before: Ints
    """Sum of ``tokens`` before each place in the line; blocks taken from the middle count 0."""
    work_before: Ints
    first: int
    stop: int
    taken: dict[int, int]
    """Rank of each block taken from the middle of ``first:stop``, by place."""


def holds_tiles(request: ContextRequest) -> bool:
    """Whether each rank holds at least two tiles."""
    return request.tokens >= 2 * request.tile * request.ranks


def grain_of(request: ContextRequest) -> int:
    """Tokens of a block: a tile, or less where a tile exceeds a rank's slack."""
    most = request.token_slack * request.tokens / request.ranks
    grain = request.tile
    while grain > most and grain > 1:
        grain = grain // 2 if grain % 2 == 0 else 1
    return grain


def spare_blocks(request: ContextRequest) -> int:
    """How many blocks to hold back: what ranks may lack after taking runs of whole blocks."""
    lacks = request.tile - 1 - request.token_slack * request.tokens / request.ranks
    return max(0, int(np.ceil(request.ranks * lacks / request.tile)))


def lay_out(request: ContextRequest, grain: int, spare: int = 0) -> tuple[Line, Rows]:
    """The line: light documents in an even mixture, then heavy ones, heaviest last.

    Blocks have ``grain`` tokens; the ``spare`` blocks of least work are held back.

    Returns:
        The line, and rows of the blocks held back, without a rank.
    """
    documents = np.flatnonzero(request.doc_tokens)
    lengths = request.doc_tokens[documents]
    pairs = pairs_before(lengths, lengths, request.mask)
    is_heavy = pairs / lengths > pairs.sum() / lengths.sum()
    place = np.empty(len(lengths), dtype=np.int64)
    place[np.lexsort((documents, lengths))] = np.arange(len(lengths))
    order = np.lexsort((np.where(is_heavy, place, place * _GOLDEN % 2**32), is_heavy))
    documents, lengths = documents[order], lengths[order]
    blocks = -(-lengths // grain)
    count = int(blocks.sum())
    row = np.arange(count) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    starts, whole = row * grain, np.repeat(lengths, blocks)
    stops = np.minimum(starts + grain, whole)
    work = count_tile_pairs(starts, stops, whole, tile=request.tile, mask=request.mask)
    if request.ranks > _FEW_RANKS:
        work += slice_pairs(starts, stops, whole, request.mask)
    document = np.repeat(documents, blocks)
    is_kept = np.zeros(count, dtype=bool)
    is_kept[np.lexsort((row, document, work))[:spare]] = True
    unowned = np.full(count, -1, dtype=np.int64)
    kept_back = np.stack((unowned, document, starts, stops), axis=1)[is_kept]
    document, row, tokens, work, owner = (
        values[~is_kept] for values in (document, row, stops - starts, work, unowned)
    )
    sums = np.zeros((2, len(row) + 1), dtype=np.int64)
    np.cumsum(tokens, out=sums[0, 1:])
    np.cumsum(work, out=sums[1, 1:])
    line = Line(document, row, tokens, work, owner, sums[0], sums[1], 0, len(row), {})
    return line, kept_back


def lay_out_again(line: Line) -> None:
    """Order the remaining blocks by work per token of what remains of their document."""
    first, stop = line.first, line.stop
    part = slice(first, stop)
    is_free = line.owner[part] < 0
    document = line.document[part]
    work = np.bincount(document, line.work[part] * is_free)
    tokens = np.bincount(document, line.tokens[part] * is_free)
    stood = np.zeros(len(work), dtype=np.int64)
    stood[document[::-1]] = np.arange(len(document))[::-1]  # the last written is the first place
    weight = work / np.maximum(tokens, 1)
    place = np.where(weight * tokens.sum() > work.sum(), weight, 0.0)
    # Taken blocks first, out of the way; light ones in their old order.
    order = first + np.lexsort((line.row[part], stood[document], place[document], is_free))
    for values in (line.document, line.row, line.tokens, line.work, line.owner):
        values[part] = values[order]
    line.first = first = first + int((~is_free).sum())
    line.taken.clear()
    left, inner = slice(first, stop), slice(first + 1, stop + 1)
    line.tokens_before[inner] = line.tokens_before[first] + np.cumsum(line.tokens[left])
    line.work_before[inner] = line.work_before[first] + np.cumsum(line.work[left])


def blocks_of(line: Line, grain: int) -> Rows:
    """The line's blocks with their ranks, one row each."""
    starts = line.row * grain
    return np.stack((line.owner, line.document, starts, starts + line.tokens), axis=1)
