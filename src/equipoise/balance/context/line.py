"""The line in which mixed context sharding lays a micro-batch's blocks, and takes them from.

What it decides
    The order: light documents first, in an even mixture of lengths, then heavy ones, heaviest
    last. A document is heavy when its tokens have more pairs than the mean token. Light ones
    are mixed because short documents waste a larger part of their tiles, and because a kernel
    spends more on many than on few: a rank takes some of each.

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
"""Up to so many ranks tiles alone are made even, beyond it the mean of tiles and exact pairs.

A rank without the last tile of any document has less waste than others, so even tiles leave it
more pairs: by 0.5% over 4 ranks and 1.3% over 8, on packs of 128K tokens of the embedded
distributions."""


@dataclass(slots=True)
class Line:
    """Blocks in a line, of which some in ``first:stop`` are still to be taken."""

    document: Ints
    row: Ints
    """Number of the block in its document."""
    tokens: Ints
    work: Ints
    owner: Ints
    """Rank that took the block, or -1."""
    tokens_before: Ints
    """Sum of ``tokens`` before each place in the line; blocks that were taken from the middle
    count nothing."""
    work_before: Ints
    first: int
    stop: int
    taken: dict[int, int]
    """Rank of blocks in ``first:stop`` that were taken from the middle, by place."""


def holds_tiles(request: ContextRequest) -> bool:
    """Whether ranks hold two tiles each, or more."""
    return request.tokens >= 2 * request.tile * request.ranks


def grain_of(request: ContextRequest) -> int:
    """Tokens of a block: a tile, or what of it is no more than the slack of a rank."""
    most = request.token_slack * request.tokens / request.ranks
    grain = request.tile
    while grain > most and grain > 1:
        grain = grain // 2 if grain % 2 == 0 else 1
    return grain


def spare_blocks(request: ContextRequest) -> int:
    """How many blocks to keep back: what ranks may lack after they took runs of whole ones."""
    lacks = request.tile - 1 - request.token_slack * request.tokens / request.ranks
    return max(0, int(np.ceil(request.ranks * lacks / request.tile)))


def lay_out(request: ContextRequest, grain: int, spare: int = 0) -> tuple[Line, Rows]:
    """The line: light documents in an even mixture, then heavy ones, heaviest last.

    Args:
        request: What is shared out.
        grain: Tokens of a block.
        spare: Blocks of least work that are kept back.

    Returns:
        The line, and rows of the blocks that were kept back, without a rank.
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
    """Order what is left by the work that a token of what is left of its document has."""
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
    # Those that were taken first, where they are in nobody's way; light ones, as they stood.
    order = first + np.lexsort((line.row[part], stood[document], place[document], is_free))
    for values in (line.document, line.row, line.tokens, line.work, line.owner):
        values[part] = values[order]
    line.first = first = first + int((~is_free).sum())
    line.taken.clear()
    left, inner = slice(first, stop), slice(first + 1, stop + 1)
    line.tokens_before[inner] = line.tokens_before[first] + np.cumsum(line.tokens[left])
    line.work_before[inner] = line.work_before[first] + np.cumsum(line.work[left])


def blocks_of(line: Line, grain: int) -> Rows:
    """Its blocks with their ranks, one row each."""
    starts = line.row * grain
    return np.stack((line.owner, line.document, starts, starts + line.tokens), axis=1)
