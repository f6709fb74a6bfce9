"""Deal tokens to ranks by where their experts probably are, equally many to each rank.

Why
    Ranks that share weights also share the tokens between layers, each the same number. Which
    rank has which token is free: a token that lies where its experts are need not travel.

What it decides
    Who gets how much of each kind of token, with the room of every rank given. It begins with
    kinds in order, and then every two ranks deal what they have together anew: the first gets the
    tokens that gain most by being there, until it is full. That is best for two ranks, and for
    more it is repeated while the value grows. All numbers are integers and ties go to the first,
    so every rank and machine has the same answer.

Kept true (tests/unit/balance/expert/test_cluster.py, by Hypothesis)
    Every token is dealt once, every rank is full; for two ranks no dealing is worth more; for more
    the value is never below that of tokens in order.

Sources
    Speculative token shuffling: Speculative MoE, arXiv:2503.04398.
"""

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.spec.layout import rows_of

_SWEEPS = 8
"""Rounds over all pairs of ranks; values hardly grow after three."""


def deal(values: Ints, mass: Ints, rooms: Ints) -> Ints:
    """Deal kinds of tokens to ranks.

    Args:
        values: Worth of one token of each kind on each rank, int64 [kinds, ranks].
        mass: Tokens of each kind, int64 [kinds].
        rooms: Tokens that each rank takes, int64 [ranks]; they add up to all.

    Returns:
        Tokens of each kind on each rank, int64 [kinds, ranks].

    Cost: ``O(ranks^2 kinds log kinds)`` for each of at most 8 sweeps; 4 ms of one core for 4,096
    kinds and 2 ranks, 50 ms for 8.

    >>> deal(np.array([[9, 0], [5, 0], [0, 1]]), np.array([2, 1, 1]), np.array([2, 2])).tolist()
    [[2, 0], [0, 1], [0, 1]]
    """
    stops = np.cumsum(rooms)
    ends = np.minimum(np.cumsum(mass)[:, np.newaxis], stops)
    begins = np.maximum((np.cumsum(mass) - mass)[:, np.newaxis], stops - rooms)
    dealt: Ints = np.maximum(ends - begins, 0).astype(np.int64)
    ranks = len(rooms)
    worth = int((dealt * values).sum())
    for _ in range(_SWEEPS if ranks > 2 else 1):
        for one in range(ranks):
            for other in range(one + 1, ranks):
                _deal_between(dealt, values, one, other)
        before, worth = worth, int((dealt * values).sum())
        if worth == before:
            break
    return dealt


def _deal_between(dealt: Ints, values: Ints, one: int, other: int) -> None:
    """Deal anew what two ranks have; ``dealt`` is changed."""
    both = dealt[:, one] + dealt[:, other]
    kinds = np.flatnonzero(both)
    if not len(kinds):
        return
    room = int(dealt[:, one].sum())
    gains = values[kinds, one] - values[kinds, other]
    order = kinds[np.argsort(-gains, kind="stable")]
    ends = np.cumsum(both[order])
    given = np.clip(room - (ends - both[order]), 0, both[order])
    dealt[order, one] = given
    dealt[order, other] = both[order] - given


def order_tokens(values: Ints, *, ranks: int) -> Ints:
    """The order of a micro-batch's tokens in which each rank's run has those dealt to it.

    Args:
        values: Worth of each token on each rank, int64 [T, ranks].
        ranks: Which divide the T tokens as ``rows_of`` does.

    Returns:
        int64 [T]; tokens of a rank are in their own order.

    >>> order_tokens(np.array([[0, 3], [3, 0], [0, 1], [2, 0]]), ranks=2).tolist()
    [1, 3, 0, 2]
    """
    tokens = len(values)
    rooms = np.array([len(rows_of(tokens, ranks=ranks, rank=rank)) for rank in range(ranks)])
    kinds, kind, mass = np.unique(values, axis=0, return_inverse=True, return_counts=True)
    dealt = deal(kinds, mass.astype(np.int64), rooms.astype(np.int64))
    # The nth token of a kind goes where the nth place of that kind is.
    kind = kind.reshape(-1)
    by_kind = np.argsort(kind, kind="stable")
    rank_of = np.empty(tokens, dtype=np.int64)
    rank_of[by_kind] = np.repeat(np.tile(np.arange(ranks), len(kinds)), dealt.reshape(-1))
    # A deal over three ranks or more is not always the best.
    own_order, as_they_come = np.arange(tokens), np.repeat(np.arange(ranks), rooms)
    if values[own_order, as_they_come].sum() > values[own_order, rank_of].sum():
        return own_order
    return np.argsort(rank_of, kind="stable").astype(np.int64)
