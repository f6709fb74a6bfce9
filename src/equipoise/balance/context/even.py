"""Even out a context split dealt in whole tiles: equal tokens by cuts, equal tiles by exchange.

Why
    With many ranks each holds few tiles. Whole tiles leave tokens uneven by up to a tile; parts
    of tiles waste the rest of a tile at every cut; and few tiles leave work uneven in whatever
    order they are dealt.

What it decides
    ``deal_spare``  Some blocks of least work were kept back, and ranks give up their lightest
                    until none has more than its equal share of tokens. These blocks are then cut
                    to the token, so that all ranks have equal tokens. A cut costs a row of tiles
                    once more, and these rows are the shortest: of the first tokens of documents::

                        spare blocks, lightest first    |aaaa|bbbb|cccc|dddd|
                        ranks, most work first           2 2 0 1 1 1 3 3 3 3
    ``even_out``    The rank with most tiles changes a whole block for a lighter one of another
                    rank, until none has more than one part in 128 above the mean. Of the exchanges
                    that do as well, the one is taken after which least keys travel: mostly between
                    two ranks that hold later tokens of both documents anyway.

Kept true (tests/unit/balance/context/test_mixed.py)
    Each token stays with one owner; dealt out, tokens of ranks differ by one at most; an exchange
    changes no rank's tokens, and never raises the most tiles of a rank.
"""

import numpy as np

from equipoise.balance.context.split import ContextRequest, Rows, join_rows
from equipoise.balance.tiles import count_tile_pairs
from equipoise.base.arrays import Ints

_EVEN = 128
"""Blocks are exchanged while some rank has more than ``1 / _EVEN`` above the mean."""

_PARTNERS = 8
"""Lightest ranks tried first; all ranks if these offer no useful exchange."""

_EXCHANGES = 4
"""Most exchanges per rank."""

_NEVER = np.iinfo(np.int64).max


def tile_pairs_of(rows: Rows, request: ContextRequest) -> Ints:
    """Pairs of the tiles of each row [pairs]."""
    _, document, starts, stops = rows.T
    doc_tokens = request.doc_tokens[document]
    return count_tile_pairs(starts, stops, doc_tokens, tile=request.tile, mask=request.mask)


def rank_tile_pairs(rows: Rows, request: ContextRequest) -> Ints:
    """Tile pairs of each rank, with adjacent rows joined [pairs]."""
    rows = join_rows(rows)
    return _sums(rows[:, 0], tile_pairs_of(rows, request), request.ranks)


def is_even(rank_pairs: Ints, *, parts: int = _EVEN) -> bool:
    """Whether no rank has more than one part in ``parts`` above the mean."""
    return bool(rank_pairs.max() <= _limit(rank_pairs, parts))


def deal_spare(rows: Rows, spare: Rows, request: ContextRequest) -> Rows:
    """Give all ranks equal tokens.

    ``rows`` have an owner and ``spare`` none: its first column is ignored.

    Returns:
        Rows of all blocks; a block that was cut has several.
    """
    ranks = request.ranks
    quota = np.full(ranks, request.tokens // ranks)
    quota[: request.tokens % ranks] += 1
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], tile_pairs_of(rows, request), rows[:, 0]))]
    sizes = rows[:, 3] - rows[:, 2]
    excess = _sums(rows[:, 0], sizes, ranks) - quota
    before = np.cumsum(sizes) - sizes
    before -= before[np.searchsorted(rows[:, 0], rows[:, 0])]
    is_kept = before >= excess[rows[:, 0]]
    pool, rows = np.concatenate((spare, rows[~is_kept])), rows[is_kept]
    pool = pool[np.lexsort((pool[:, 2], pool[:, 1], tile_pairs_of(pool, request)))]
    lacks = quota - _sums(rows[:, 0], rows[:, 3] - rows[:, 2], ranks)
    order = np.lexsort((np.arange(ranks), -rank_tile_pairs(rows, request)))
    block_ends = np.cumsum(pool[:, 3] - pool[:, 2])
    rank_ends = np.cumsum(lacks[order])
    cuts = np.union1d(0, np.union1d(block_ends, rank_ends))
    block = np.searchsorted(block_ends, cuts[:-1], side="right")
    rank = order[np.searchsorted(rank_ends, cuts[:-1], side="right")]
    shift = pool[block, 3] - block_ends[block]
    dealt = (rank, pool[block, 1], cuts[:-1] + shift, cuts[1:] + shift)
    return np.concatenate((rows, np.stack(dealt, axis=1)))


def even_out(rows: Rows, request: ContextRequest) -> Rows:
    """Exchange whole blocks between ranks until no rank has many more tiles than the mean.

    Only whole tiles at a multiple of the tile are exchanged.

    Cost: O(blocks of a rank, squared) an exchange.
    """
    ranks, tile = request.ranks, request.tile
    loads = rank_tile_pairs(rows, request)
    if is_even(loads):
        return rows
    limit = _limit(loads, _EVEN)
    rows = rows.copy()
    blocks = ((rows[:, 3] - rows[:, 2] == tile) & (rows[:, 2] % tile == 0)).nonzero()[0]
    work = tile_pairs_of(rows[blocks], request)
    owner, document, ends = rows[blocks, 0], rows[blocks, 1], rows[blocks, 3]
    # How far each rank already reads into each document.
    reach = np.zeros((ranks, len(request.doc_tokens)), dtype=np.int64)
    np.maximum.at(reach, (rows[:, 0], rows[:, 1]), rows[:, 3])
    for _ in range(_EXCHANGES * ranks):
        heavy = int(loads.argmax())
        if loads[heavy] <= limit:
            break
        mine = (owner == heavy).nonzero()[0]
        for count in (_PARTNERS, ranks):
            is_partner = np.zeros(ranks, dtype=bool)
            is_partner[loads.argsort(kind="stable")[:count]] = True
            theirs = is_partner[owner].nonzero()[0]
            gains = work[mine][:, None] - work[theirs]
            after = np.maximum(loads[heavy] - gains, loads[owner[theirs]] + gains)
            best = int(after.min(initial=loads[heavy]))
            if best < loads[heavy]:
                break
        else:
            break
        travel = np.maximum(0, ends[mine] - reach[owner[theirs]][:, document[mine]]).T
        travel = travel + np.maximum(0, ends[theirs] - reach[heavy, document[theirs]])
        travel[after > max(best, limit)] = _NEVER
        row, column = divmod(int(travel.argmin()), len(theirs))
        given, gained = mine[row], theirs[column]
        light = int(owner[gained])
        loads[heavy] -= gains[row, column]
        loads[light] += gains[row, column]
        for block, rank in ((given, light), (gained, heavy)):
            owner[block] = rank
            reach[rank, document[block]] = max(reach[rank, document[block]], ends[block])
    rows[blocks, 0] = owner
    return rows


def _limit(rank_pairs: Ints, parts: int) -> int:
    mean = -(-int(rank_pairs.sum()) // len(rank_pairs))
    return mean + mean // parts


def _sums(rank: Ints, values: Ints, ranks: int) -> Ints:
    return np.bincount(rank, values, ranks).astype(np.int64)
