"""Plan the context parallelism of one pack: who holds which tokens, and what moves.

Why
    Two choices make a plan: which rank holds which tokens (``sharding``, from
    ``balance.context.sharding``), and what moves between ranks (``strategy``, from ``schedule``).
    Any sharding works with any strategy. All ranks decide alike from the lengths alone.

Kept true (tests/unit/balance/context/test_plan.py)
    Shares of all ranks are a permutation of the pack; equal arguments give equal plans.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.context.price import ContextPrice
from equipoise.balance.context.sharding import split_context
from equipoise.balance.tiles import TILE
from equipoise.base.arrays import Ints
from equipoise.schedule.attention.check import check_attention
from equipoise.schedule.attention.schedule import AttentionSchedule
from equipoise.schedule.attention.strategies import write_attention
from equipoise.spec.mask import CAUSAL, Mask
from equipoise.spec.pack import Pieces, lengths_of


@dataclass(frozen=True, slots=True, eq=False)
class ContextShares:
    """Which tokens of a pack each rank holds."""

    pieces: tuple[Pieces, ...]
    """Each rank's pieces in order, int64 [n, 3]: document, start, stop."""
    rows: tuple[Ints, ...]
    """The rows of the pack that each rank holds, in its order, int64 [tokens]."""
    positions: tuple[Ints, ...]
    """The position in its document of each token of each rank, int64 [tokens]."""

    @property
    def tokens(self) -> int:
        """Tokens of the pack."""
        return sum(map(len, self.rows))


@dataclass(frozen=True, slots=True, eq=False)
class ContextPlan:
    """Shares, and the schedule of attention over them."""

    shares: ContextShares
    schedule: AttentionSchedule


def share_tokens(
    doc_tokens: Sequence[int],
    ranks: int,
    sharding: str = "mixed",
    *,
    tile: int = TILE,
    ranks_per_node: int | None = None,
    price: ContextPrice | None = None,
) -> ContextShares:
    """Decide which rank holds which tokens of a pack.

    Args:
        doc_tokens: Length of each packed document, in order [tokens].
        ranks: Context-parallel degree.
        sharding: A strategy of ``balance.context.sharding``, or ``auto``.
        tile: Queries of one attention tile [tokens]; ``mixed`` and ``by-work`` cut there.
        ranks_per_node: Ranks that share a node, for ``hierarchical``.
        price: What ``auto`` decides by.

    Raises:
        LayoutError: lengths, ranks or tile are none.
        SpecError: no sharding has that name.

    >>> [rows.tolist() for rows in share_tokens([4, 2], 2, "head-tail-document").rows]
    [[0, 3, 4], [1, 2, 5]]
    """
    lengths = tuple(int(tokens) for tokens in doc_tokens)
    return _share(lengths, ranks, sharding, tile, ranks_per_node, price)


@functools.lru_cache(maxsize=64)
def _share(
    doc_tokens: tuple[int, ...],
    ranks: int,
    sharding: str,
    tile: int,
    per_node: int | None,
    price: ContextPrice | None,
) -> ContextShares:
    split = split_context(
        doc_tokens, ranks, sharding, tile=tile, ranks_per_node=per_node, price=price
    )
    return _shares_of(split.pieces, doc_tokens)


def _shares_of(home: Sequence[Pieces], doc_tokens: Sequence[int]) -> ContextShares:
    lengths = np.asarray(doc_tokens, dtype=np.int64).reshape(-1)
    begins = np.cumsum(lengths) - lengths
    rows, positions = [], []
    for pieces in home:
        sizes = lengths_of(pieces)
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        positions.append(np.repeat(pieces[:, 1], sizes) + within)
        rows.append(positions[-1] + np.repeat(begins[pieces[:, 0]], sizes))
    return ContextShares(tuple(home), tuple(rows), tuple(positions))


def plan_context(
    doc_tokens: Sequence[int],
    ranks: int,
    strategy: str = "needed-kv",
    *,
    heads: int,
    kv_heads: int,
    mask: Mask | Sequence[Mask] = CAUSAL,
    sharding: str = "mixed",
    tile: int = TILE,
    ranks_per_node: int | None = None,
    price: ContextPrice | None = None,
    is_checked: bool = False,
) -> ContextPlan:
    """Plan attention over one pack; the same arguments give the same plan on every rank.

    Args:
        doc_tokens: Length of each packed document, in order [tokens].
        ranks: Context-parallel degree.
        strategy: What moves: a name in ``schedule.attention.strategies``.
        heads: Query heads.
        kv_heads: Key/value heads.
        mask: Which keys a query reads: one mask for all documents, or one for each.
        sharding: Who holds what: a strategy of ``balance.context.sharding``, or ``auto``. It evens
            out causal work, whatever the mask.
        tile: Queries of one attention tile [tokens].
        ranks_per_node: Ranks that share a node; for strategies in two levels.
        price: What ``auto`` decides by; the same wherever this pack is shared out.
        is_checked: Prove the schedule right, which takes longer than to write it.

    Raises:
        LayoutError: lengths, ranks or heads do not go together.
        SpecError: no strategy or sharding has that name, or masks do not go with documents.
        CheckError: the schedule is not right.

    Cost: milliseconds; the plans of the last 64 packs are kept.

    >>> plan = plan_context([6, 2], 2, "ring", heads=2, kv_heads=1, sharding="contiguous")
    >>> [pieces.tolist() for pieces in plan.schedule.home]
    [[[0, 0, 4]], [[0, 4, 6], [1, 0, 2]]]
    """
    lengths = tuple(int(tokens) for tokens in doc_tokens)
    shares = _share(lengths, ranks, sharding, tile, ranks_per_node, price)
    masks = mask if isinstance(mask, Mask) else tuple(mask)
    plan = _plan(lengths, strategy, heads, kv_heads, masks, shares, ranks_per_node)
    if is_checked:
        check_attention(plan.schedule)
    return plan


@functools.lru_cache(maxsize=64)
def _plan(
    doc_tokens: tuple[int, ...],
    strategy: str,
    heads: int,
    kv_heads: int,
    masks: Mask | tuple[Mask, ...],
    shares: ContextShares,
    ranks_per_node: int | None,
) -> ContextPlan:
    schedule = write_attention(
        strategy,
        shares.pieces,
        doc_tokens,
        heads=heads,
        kv_heads=kv_heads,
        mask=masks,
        ranks_per_node=ranks_per_node,
    )
    return ContextPlan(shares, schedule)


def plan_pieces(
    home: Sequence[Pieces],
    doc_tokens: Sequence[int],
    strategy: str = "needed-kv",
    *,
    heads: int,
    kv_heads: int,
    mask: Mask | Sequence[Mask] = CAUSAL,
    ranks_per_node: int | None = None,
) -> ContextPlan:
    """Plan attention over pieces that something else has placed: each document on its own ranks.

    Under ``needed-kv`` a document's keys pass between its own ranks alone, whichever they are:
    groups of ranks that differ from document to document, and from pack to pack, need no
    communicator of their own.

    Args:
        home: Of each rank its pieces, int64 [n, 3]: document, start, stop; in order.
        doc_tokens: Length of each packed document, in order [tokens].
        strategy: What moves.
        heads: Query heads.
        kv_heads: Key/value heads.
        mask: Which keys a query reads: one mask for all documents, or one for each.
        ranks_per_node: Ranks that share a node; for strategies in two levels.

    Raises:
        LayoutError: ranks or heads do not go together.
        SpecError: no strategy has that name, or masks do not go with the documents.
        CheckError: a token has no home, or two, or pieces are out of order.

    >>> home = [np.array([[0, 0, 5]]), np.array([[0, 5, 7]]), np.array([[1, 0, 3]])]
    >>> plan = plan_pieces(home, [7, 3], heads=2, kv_heads=1)
    >>> [len(rounds[0].sends) for rounds in plan.schedule.rounds]
    [1, 0, 0]
    """
    schedule = write_attention(
        strategy,
        home,
        doc_tokens,
        heads=heads,
        kv_heads=kv_heads,
        mask=mask,
        ranks_per_node=ranks_per_node,
    )
    check_attention(schedule)
    return ContextPlan(_shares_of(schedule.home, doc_tokens), schedule)
