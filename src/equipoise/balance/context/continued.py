"""Share the next tokens of texts whose keys are already spread over ranks.

Why
    A text that is continued has keys from earlier, and each rank keeps its own: moving them would
    cost what they saved. Only the new tokens are placed, so that afterwards every rank has as many
    keys of every text as any other: neither memory nor the next step's reading waits for one rank.

What it decides
    New tokens fill up the ranks that have the fewest keys, to within one token where they can;
    ties go to the rank with the fewest new tokens so far, so that single tokens of several texts
    spread over all ranks. A rank's share is two pieces, one from the head and one from the tail,
    since a late token reads more keys than an early one::

        8 new tokens over 2 ranks      0 0 1 1 1 1 0 0

    All new tokens read all earlier ones, so an attention schedule may number those as it likes:
    rank after rank, so that what a rank has of a text is one run, however it came there.

Kept true (tests/unit/balance/context/test_continued.py, by Hypothesis)
    Ranks have equally many keys of each text, within one, if they had before; new tokens have one
    home each; pairs of a long prompt are even.

Sources
    Persistent keys, beside which only new tokens are placed: Context Parallelism for Scalable
    Million-Token Inference, arXiv:2411.01783, section 3.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.schedule.attention.runs import join_runs
from equipoise.schedule.attention.schedule import AttentionSchedule
from equipoise.schedule.attention.strategies import write_attention
from equipoise.spec.pack import Pieces, lengths_of


@dataclass(frozen=True, slots=True, eq=False)
class ContinuedPlan:
    """Who computes which new tokens of several texts, and the attention over them."""

    schedule: AttentionSchedule
    """Document i is text i: earlier tokens first, numbered rank after rank, then the new ones."""
    rows: tuple[Ints, ...]
    """The new tokens of each rank, in its order: rows of all texts' new tokens, one text after
    another, int64 [tokens]."""
    key_tokens: tuple[Ints, ...]
    """Tokens of each text of which each rank has keys afterwards, int64 [texts]. In that order,
    a rank's keys are those of text 0, earlier ones first, then of text 1, and so on."""


def plan_continued(
    cached: Sequence[Sequence[int]],
    new: Sequence[int],
    strategy: str,
    *,
    heads: int,
    kv_heads: int,
    ranks_per_node: int | None = None,
) -> ContinuedPlan:
    """Place the new tokens of each text, and write the attention of one layer.

    Args:
        cached: Of each text, the tokens of which each rank has keys [tokens]; 0 for a new text.
        new: New tokens of each text [tokens], at least one.
        strategy: What moves between ranks: a name in ``schedule.attention.strategies`` that does
            not divide heads.
        heads: Query heads.
        kv_heads: Key/value heads.
        ranks_per_node: Ranks that share a node; for ``double-ring``.

    Raises:
        LayoutError: texts do not match, a number is negative, or the strategy divides heads.
        SpecError: no strategy has that name.

    >>> plan = plan_continued([[4, 4]], [1], "gather-q", heads=2, kv_heads=1)
    >>> print(plan.schedule)
    gather-q: 9 tokens of 1 documents over 2 ranks, 2 query heads, 1 key/value heads
    rank 0 holds 0[8:9]
      and keys of 0[0:4]
      round 0
        send to 1: q 0[8:9] heads 0:2
        attend document 0 queries 8:9 keys 8:9 causal, heads 0:2
        attend document 0 queries 8:9 keys 0:4 full, heads 0:2
      round 1
      round 2
        receive from 1: partial 0[8:9] heads 0:2
    rank 1 holds nothing
      and keys of 0[4:8]
      round 0
        receive from 0: q 0[8:9] heads 0:2
      round 1
        attend document 0 queries 8:9 keys 4:8 full, heads 0:2
      round 2
        send to 0: partial 0[8:9] heads 0:2
    """
    table = np.asarray(cached, dtype=np.int64).reshape(len(new), -1)
    counts = np.asarray(new, dtype=np.int64)
    if not len(new) or table.min(initial=0) < 0 or counts.min(initial=1) < 1:
        raise LayoutError(
            "Give one text or more, each with at least one new token, and no negative number of "
            "cached ones."
        )
    ranks = table.shape[1]
    home: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    held: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    loads = np.zeros(ranks, dtype=np.int64)
    after = table.copy()
    for text, (have, tokens) in enumerate(zip(table, counts.tolist(), strict=True)):
        shares = fill_up(have, tokens, loads)
        loads += shares
        after[text] += shares
        ends = np.cumsum(have)
        for rank, (end, count) in enumerate(zip(ends.tolist(), have.tolist(), strict=True)):
            if count:
                held[rank].append((text, end - count, end))
        for rank, start, stop in _head_and_tail(shares, int(ends[-1])):
            home[rank].append((text, start, stop))
    pieces = tuple(map(_in_order, home))
    schedule = write_attention(
        strategy,
        pieces,
        table.sum(axis=1) + counts,
        heads=heads,
        kv_heads=kv_heads,
        ranks_per_node=ranks_per_node,
        cached=tuple(map(_in_order, held)),
    )
    # Rows of all new tokens: those of earlier texts come before; cached tokens have none.
    shift = np.cumsum(counts) - counts - table.sum(axis=1)
    rows = tuple(_rows(each, shift) for each in pieces)
    return ContinuedPlan(schedule, rows, tuple(after.T))


def fill_up(have: Ints, tokens: int, loads: Ints) -> Ints:
    """Share tokens so that ranks have equally many, as far as they can.

    Args:
        have: What each rank has [tokens].
        tokens: How many more to place.
        loads: Ranks that end with equally many get the odd tokens by these, the least first.

    >>> none = np.zeros(3, dtype=np.int64)
    >>> fill_up(np.array([5, 0, 2]), 4, none).tolist(), fill_up(none, 7, none).tolist()
    ([0, 3, 1], [3, 2, 2])
    """
    order = np.lexsort((np.arange(len(have)), loads, have))
    sorted_have = have[order]
    # The most ranks, those with the fewest first, that these tokens lift to one level.
    lifted = np.arange(1, len(have) + 1) * sorted_have - np.cumsum(sorted_have) <= tokens
    count = int(np.flatnonzero(lifted)[-1]) + 1
    level, odd = divmod(int(sorted_have[:count].sum()) + tokens, count)
    chosen = order[:count]
    shares = np.zeros_like(have)
    shares[chosen] = level - have[chosen]
    by_load = chosen[np.lexsort((chosen, have[chosen] != level, loads[chosen]))]
    shares[by_load[:odd]] += 1
    return shares


def _head_and_tail(shares: Ints, start: int) -> list[tuple[int, int, int]]:
    """Rank, first token and token stop of each piece, in the order of the text."""
    heads = -(-shares // 2)
    order = [*range(len(shares)), *reversed(range(len(shares)))]
    sizes = [*heads.tolist(), *(shares - heads)[::-1].tolist()]
    pieces = []
    for rank, size in zip(order, sizes, strict=True):
        if size:
            pieces.append((rank, start, start + size))
        start += size
    return pieces


def _in_order(pieces: list[tuple[int, int, int]]) -> Pieces:
    return join_runs(np.array(pieces, dtype=np.int64).reshape(-1, 3))


def _rows(pieces: Pieces, shift: Ints) -> Ints:
    sizes = lengths_of(pieces)
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    rows: Ints = np.repeat(pieces[:, 1] + shift[pieces[:, 0]], sizes) + within
    return rows
