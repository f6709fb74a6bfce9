"""Attention strategies by name: from a placement of tokens to a schedule.

Why
    Placing tokens (which rank holds which piece) and moving them (what is sent to whom) are two
    choices. ``balance.context.sharding`` makes the first. Every strategy here takes any
    placement: documents cut anywhere, ranks without a token, more ranks than tokens, any heads,
    and a mask per document.

Kept true (tests/unit/schedule/attention/test_strategies.py, by Hypothesis)
    Every strategy's schedule passes ``check_attention`` for any placement and masks.
"""

from collections.abc import Sequence

import numpy as np

from equipoise.base.errors import LayoutError, SpecError
from equipoise.base.nearest import nearest
from equipoise.schedule.attention.heads import ulysses, usp
from equipoise.schedule.attention.mask import masks_of
from equipoise.schedule.attention.pass_kv import all_gather, double_ring, needed_kv, ring
from equipoise.schedule.attention.pass_q import gather_q, pass_q, token_ring
from equipoise.schedule.attention.request import AttentionRequest, AttentionStrategy
from equipoise.schedule.attention.schedule import AttentionSchedule
from equipoise.spec.mask import CAUSAL, Mask
from equipoise.spec.pack import Pieces

STRATEGIES: dict[str, AttentionStrategy] = {
    "all-gather": all_gather,
    "needed-kv": needed_kv,
    "ring": ring,
    "double-ring": double_ring,
    "pass-q": pass_q,
    "token-ring": token_ring,
    "gather-q": gather_q,
    "ulysses": ulysses,
    "usp": usp,
}
"""Every strategy by name."""

BY_HEADS = ("ulysses", "usp")
"""Strategies that divide heads, so that every rank needs its heads of all keys."""

IN_NODES = ("double-ring", "usp")
"""Two-level strategies, which need to know which ranks share a node."""


def write_attention(
    strategy: str,
    home: Sequence[Pieces],
    doc_tokens: Sequence[int] | Pieces,
    *,
    heads: int,
    kv_heads: int,
    mask: Mask | Sequence[Mask] = CAUSAL,
    ranks_per_node: int | None = None,
    cached: Sequence[Pieces] = (),
) -> AttentionSchedule:
    """Write the schedule of one attention layer over packed documents.

    Args:
        strategy: A name in ``STRATEGIES``.
        home: Each rank's pieces, int64 [n, 3]: document, start, stop; in order. Together they
            hold each token once; ``ContextSplit.pieces`` is such a placement.
        doc_tokens: Length of each document [tokens]; may be 0, and the list empty.
        heads: Query heads.
        kv_heads: Key/value heads; divides ``heads``.
        mask: Which keys a query reads: one mask for all documents, or one per document.
        ranks_per_node: Ranks that share a node; divides the ranks. Needed by ``double-ring``
            and ``usp``.
        cached: Each rank's pieces of which it has keys from earlier and nobody has queries; with
            them, ``home`` and ``cached`` together hold each token once.

    Raises:
        SpecError: no strategy has that name, or masks do not match the documents.
        LayoutError: heads or ranks do not divide, the strategy needs ``ranks_per_node``, or it
            divides heads and keys are cached.

    Cost: O(ranks^2 x pieces of a rank), in NumPy.

    >>> home = [np.array([[0, 0, 4]]), np.array([[0, 4, 6]])]
    >>> print(write_attention("needed-kv", home, [6], heads=2, kv_heads=1))
    needed-kv: 6 tokens of 1 documents over 2 ranks, 2 query heads, 1 key/value heads
    rank 0 holds 0[0:4]
      round 0
        send to 1: kv 0[0:4] heads 0:1
        attend document 0 queries 0:4 keys 0:4 causal, heads 0:2
      round 1
    rank 1 holds 0[4:6]
      round 0
        receive from 0: kv 0[0:4] heads 0:1
        attend document 0 queries 4:6 keys 4:6 causal, heads 0:2
      round 1
        attend document 0 queries 4:6 keys 0:4 full, heads 0:2
    """
    if strategy not in STRATEGIES:
        raise SpecError(
            f'No attention strategy is called "{strategy}". Nearest: '
            f"{nearest(strategy, list(STRATEGIES))}. All: {', '.join(STRATEGIES)}."
        )
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise LayoutError(
            f"{heads} query heads cannot share {kv_heads} key/value heads. Give a number of "
            f"key/value heads that divides the query heads."
        )
    if ranks_per_node is None and strategy in IN_NODES:
        raise LayoutError(
            f"{strategy} works within nodes and between them. Give ranks_per_node, the number of "
            f"ranks that share a node."
        )
    per_node = len(home) if ranks_per_node is None else ranks_per_node
    if per_node < 1 or len(home) % per_node:
        raise LayoutError(
            f"{len(home)} ranks do not fill nodes of {per_node}. Give a ranks_per_node that "
            f"divides the ranks."
        )
    if any(map(len, cached)) and strategy in BY_HEADS:
        raise LayoutError(
            f"{strategy} would send every rank its heads of all cached keys. Where keys are "
            f"cached, use {', '.join(name for name in STRATEGIES if name not in BY_HEADS)}."
        )
    if cached and len(cached) != len(home):
        raise LayoutError(
            f"{len(cached)} ranks have cached keys and {len(home)} have tokens. Give both for each "
            f"rank."
        )
    lengths = np.asarray(doc_tokens, dtype=np.int64).reshape(-1)
    pieces = tuple(np.asarray(each, dtype=np.int64).reshape(-1, 3) for each in home)
    masks = masks_of(mask, lengths)
    keys = tuple(np.asarray(each, dtype=np.int64).reshape(-1, 3) for each in cached)
    keys = keys if any(map(len, keys)) else ()
    request = AttentionRequest(lengths, masks, pieces, heads, kv_heads, per_node, keys)
    return STRATEGIES[strategy](request)
