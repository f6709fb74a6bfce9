"""Move the fewest tokens from attention's layout to one of equal tokens, and back.

Why
    Attention wants equal pairs and linear layers want equal tokens. Where one layout cannot
    give both, tokens change ranks in between. Ranks wait for what moves, so only tokens beyond
    a rank's quota do.

What it decides
    The quota of each rank (the mean, rounded up for the ranks with the most tokens), which
    tokens leave (the last of their rank), and where each token ends up::

        attention layout     rank 0: a b c d e f    rank 1: g h
        quota 4 and 4        rank 0: a b c d        rank 1: g h | e f
                                                    kept first, then received, in order
        back                 the same ranges, the other way

    Nothing that trains calls it: under ``mixed`` it would save 0.2% of a layer's linear work, by
    the prices in docs/balance/context-sharding.md.

Kept true (tests/unit/balance/context/test_remap.py, by Hypothesis)
    The order is a permutation; ranks' tokens differ by at most one; counted bytes are moved
    tokens times their size; no fewer moves suffice; there and back is the identity.

Sources
    A remapping layer between attention and linear modules: Zeppelin, EuroSys 2026.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.balance.context.split import ContextSplit
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Remap:
    """A permutation of a micro-batch's tokens over ranks, as ranges that move."""

    tokens_before: Ints
    """Tokens of each rank before the moves [tokens]."""
    tokens_after: Ints
    """Tokens of each rank after the moves [tokens]."""
    moves: Ints
    """Ranges that change ranks: int64 [n, 5], each (source, destination, start, stop, at).
    ``start:stop`` count in the source's tokens before, ``at`` in the destination's after.
    All other tokens stay on their rank, in order."""
    bytes_per_token: int

    @property
    def moved_tokens(self) -> int:
        """Tokens that change ranks."""
        return int((self.moves[:, 3] - self.moves[:, 2]).sum())

    @property
    def moved_bytes(self) -> Ints:
        """Bytes from each rank (row) to each rank (column), int64 [ranks, ranks]."""
        moved = np.zeros((len(self.tokens_before),) * 2, dtype=np.int64)
        sizes = self.moves[:, 3] - self.moves[:, 2]
        np.add.at(moved, (self.moves[:, 0], self.moves[:, 1]), sizes * self.bytes_per_token)
        return moved

    @property
    def order(self) -> Ints:
        """Where each token of the new layout was: int64 [tokens], rank after rank.

        ``after = before[order]``, both laid end to end over ranks.
        """
        begin_before = np.cumsum(self.tokens_before) - self.tokens_before
        begin_after = np.cumsum(self.tokens_after) - self.tokens_after
        total = int(self.tokens_before.sum())
        order = np.full(total, -1, dtype=np.int64)
        is_kept = np.ones(total, dtype=bool)
        for source, destination, start, stop, at in self.moves.tolist():
            moved = np.arange(begin_before[source] + start, begin_before[source] + stop)
            is_kept[moved] = False
            place = int(begin_after[destination]) + at
            order[place : place + len(moved)] = moved
        # Kept tokens fill the remaining places of their rank, in order.
        order[order < 0] = np.flatnonzero(is_kept)
        return order

    @property
    def inverse(self) -> "Remap":
        """The remap that undoes this one.

        >>> there = remap_counts(np.array([6, 2]), bytes_per_token=1)
        >>> there.order[there.inverse.order].tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
        """
        sizes = self.moves[:, 3] - self.moves[:, 2]
        source, destination, start, _, at = self.moves.T
        moves = np.stack((destination, source, at, at + sizes, start), axis=1)
        moves = moves[np.lexsort((moves[:, 2], moves[:, 1], moves[:, 0]))]
        return Remap(self.tokens_after, self.tokens_before, moves, self.bytes_per_token)


def remap_tokens(split: ContextSplit, *, bytes_per_token: int) -> Remap:
    """Move the fewest tokens so that all ranks of a split have equally many, to within one.

    Args:
        split: Attention's layout; a rank's tokens are in the order of its pieces.
        bytes_per_token: What moves with a token, such as ``hidden x element size`` [bytes].

    Raises:
        LayoutError: ``bytes_per_token`` is below 0.
    """
    return remap_counts(split.tokens, bytes_per_token=bytes_per_token)


def remap_counts(tokens: Ints, *, bytes_per_token: int) -> Remap:
    """``remap_tokens`` from the token count of each rank.

    Cost: O(ranks).

    >>> remap = remap_counts(np.array([6, 2]), bytes_per_token=10)
    >>> remap.moves.tolist(), remap.moved_bytes.tolist()
    ([[0, 1, 4, 6, 2]], [[0, 20], [0, 0]])
    """
    if bytes_per_token < 0:
        raise LayoutError(f"A token of {bytes_per_token} bytes cannot move. Give 0 or more.")
    ranks = len(tokens)
    share, more = divmod(int(tokens.sum()), ranks)
    quota = np.full(ranks, share, dtype=np.int64)
    quota[np.lexsort((np.arange(ranks), -tokens))[:more]] += 1
    # All surpluses laid end to end are matched with all deficits laid end to end.
    surplus, lack = np.maximum(tokens - quota, 0), np.maximum(quota - tokens, 0)
    given, wanted = np.cumsum(surplus), np.cumsum(lack)
    cuts = np.union1d(given, wanted)
    starts = np.concatenate(([0], cuts[:-1]))
    starts, stops = starts[starts < cuts], cuts[starts < cuts]
    source = np.searchsorted(given, starts, side="right")
    destination = np.searchsorted(wanted, starts, side="right")
    begin = starts - (given - surplus)[source] + quota[source]
    at = starts - (wanted - lack)[destination] + tokens[destination]
    moves = np.stack((source, destination, begin, begin + stops - starts, at), axis=1)
    return Remap(tokens, quota, moves, bytes_per_token)
