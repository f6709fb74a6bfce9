"""Context sharding by a fixed rule: contiguous runs, head-tail chunks, tiles dealt by work.

What it decides
    ``contiguous``          one run of the pack each. The plain baseline: equal tokens, and
                            the tails of long documents on few ranks.
    ``head-tail``           the pack in 2 x ranks chunks; rank r holds chunks r and
                            2 x ranks - 1 - r. Even for one document, not for many.
    ``head-tail-document``  the same inside every document. Even for all, but each document is
                            cut, and its keys travel to every rank.
    ``by-work``             tiles of queries sorted by their keys and dealt back and forth.
                            Evenest in work, scattered in memory.

    ::

        2 ranks        contiguous     head-tail      head-tail-document
        aaaaaaaabbbb   000000111111   000111111000   001111000110

    Lengths need not divide: leftover tokens go to the chunks one by one, and the turn carries
    over from document to document, so ranks differ by at most one token and nothing is padded.
    A document with fewer tokens than chunks leaves some empty.

Kept true (tests/unit/balance/context/test_sharding.py, by Hypothesis)
    Each token has one owner; under the first three, ranks' token counts differ by at most one.

Sources
    Head-tail: Llama 3 report, arXiv:2407.21783, section 3.3.2. Per document, with the
    remainder carried on: WLB-LLM, arXiv:2503.17924, section 5, and its reference code. By
    work: the PTRR load balancer of torch.distributed's context parallelism.
"""

import numpy as np

from equipoise.balance.context.split import ContextRequest, Rows
from equipoise.balance.tiles import count_tile_pairs
from equipoise.base.arrays import Ints


def _even_bounds(tokens: int, parts: int) -> Ints:
    """Bounds of ``parts`` runs; the first ones are a token longer.

    >>> _even_bounds(7, 3).tolist()
    [0, 3, 5, 7]
    """
    at = np.arange(parts + 1, dtype=np.int64)
    return at * (tokens // parts) + np.minimum(at, tokens % parts)


def _rows_of_runs(doc_tokens: Ints, bounds: Ints, rank_of: Ints) -> Rows:
    """Rows of runs ``bounds[i]:bounds[i + 1]`` of the pack, cut where documents end."""
    ends = np.cumsum(doc_tokens)
    cuts = np.union1d(bounds, ends)
    starts, stops = cuts[:-1], cuts[1:]
    document = np.searchsorted(ends, starts, side="right")
    run = np.searchsorted(bounds, starts, side="right") - 1
    begins = (ends - doc_tokens)[document]
    return np.stack((rank_of[run], document, starts - begins, stops - begins), axis=1)


def _fold(chunks: int) -> Ints:
    """Rank of each of ``chunks`` chunks: 0 1 2 2 1 0."""
    at = np.arange(chunks, dtype=np.int64)
    return np.minimum(at, chunks - 1 - at)


def contiguous(request: ContextRequest) -> Rows:
    """Give each rank one run of the pack, all of equal tokens.

    >>> contiguous(ContextRequest(np.array([8, 4]), 2)).tolist()
    [[0, 0, 0, 6], [1, 0, 6, 8], [1, 1, 0, 4]]
    """
    bounds = _even_bounds(request.tokens, request.ranks)
    return _rows_of_runs(request.doc_tokens, bounds, np.arange(request.ranks))


def head_tail(request: ContextRequest) -> Rows:
    """Give each rank two chunks of the pack, equally far from the front and the back.

    >>> head_tail(ContextRequest(np.array([8, 4]), 2)).tolist()
    [[0, 0, 0, 3], [1, 0, 3, 6], [1, 0, 6, 8], [1, 1, 0, 1], [0, 1, 1, 4]]
    """
    chunks = 2 * request.ranks
    bounds = _even_bounds(request.tokens, chunks)
    return _rows_of_runs(request.doc_tokens, bounds, _fold(chunks))


def head_tail_document(request: ContextRequest) -> Rows:
    """Give each rank two chunks of every document.

    >>> head_tail_document(ContextRequest(np.array([8, 3]), 2))[4:].tolist()
    [[0, 1, 0, 1], [1, 1, 1, 2], [1, 1, 2, 3], [0, 1, 3, 3]]
    """
    return fold_documents(np.arange(len(request.doc_tokens)), request.doc_tokens, request.ranks)


def fold_documents(documents: Ints, doc_tokens: Ints, ranks: int) -> Rows:
    """Deal documents, in 2 x ranks chunks each, to ranks 0 to ``ranks - 1``.

    Returns:
        Rows, some empty; the ranks' token counts differ by at most one.
    """
    chunks = 2 * ranks
    rest = doc_tokens % chunks
    carried = np.cumsum(rest) - rest
    turn = (np.arange(chunks) - carried[:, None]) % chunks
    sizes = doc_tokens[:, None] // chunks + (turn < rest[:, None])
    stops = np.cumsum(sizes, axis=1)
    rows = np.empty((len(documents), chunks, 4), dtype=np.int64)
    rows[:, :, 0] = _fold(chunks)
    rows[:, :, 1] = documents[:, None]
    rows[:, :, 2] = stops - sizes
    rows[:, :, 3] = stops
    return rows.reshape(-1, 4)


def by_work(request: ContextRequest) -> Rows:
    """Deal query tiles to ranks back and forth, most keys first.

    >>> by_work(ContextRequest(np.array([8]), 2, tile=2)).tolist()
    [[0, 0, 6, 8], [1, 0, 4, 6], [1, 0, 2, 4], [0, 0, 0, 2]]
    """
    lengths, tile = request.doc_tokens, request.tile
    blocks = -(-lengths // tile)
    document = np.repeat(np.arange(len(lengths)), blocks)
    starts = tile * (np.arange(len(document)) - np.repeat(np.cumsum(blocks) - blocks, blocks))
    stops = np.minimum(starts + tile, lengths[document])
    work = count_tile_pairs(starts, stops, lengths[document], tile=tile, mask=request.mask)
    order = np.lexsort((starts, document, starts - stops, -work))
    turn = np.arange(len(order)) % (2 * request.ranks)
    rank = np.minimum(turn, 2 * request.ranks - 1 - turn)
    return np.stack((rank, document[order], starts[order], stops[order]), axis=1)
