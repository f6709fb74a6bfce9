"""Context sharding: divide a micro-batch's documents between the ranks that share its context.

Why
    A causal query at offset ``i`` of its document reads ``i + 1`` keys, so equal tokens are
    unequal work: cut one long document into 4 runs and the last rank does 7 times the first
    one's attention. Cut all documents so that work is even, and all their keys travel.

What it decides
    Which function splits under which name, and which strategy ``auto`` takes for this
    micro-batch: the one with the least predicted time (``balance.context.price``).

Kept true (tests/unit/balance/context/test_sharding.py, test_auto.py, by Hypothesis)
    Each token has exactly one owner; ``auto`` is predicted to be no slower than any strategy it
    compared; the answer depends on the arguments alone, so ranks need not ask each other.

Sources
    A choice for each micro-batch, by tiles and by measured kernels: WLB-LLM,
    arXiv:2503.17924, section 5.3.
"""

import functools
from collections.abc import Sequence

import numpy as np

from equipoise.balance.context.fixed import (
    by_work,
    contiguous,
    head_tail,
    head_tail_document,
)
from equipoise.balance.context.hierarchical import hierarchical
from equipoise.balance.context.mixed import mixed
from equipoise.balance.context.price import ContextPrice
from equipoise.balance.context.split import (
    ContextRequest,
    ContextSplit,
    Strategy,
    count_split,
)
from equipoise.balance.tiles import TILE
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError, SpecError
from equipoise.base.fields import is_whole
from equipoise.base.nearest import nearest
from equipoise.base.shown import shown
from equipoise.cost.curve import LoadCurve, counted_curve
from equipoise.cost.work import CAUSAL, Mask
from equipoise.spec.limits import MOST_SIZE
from equipoise.spec.model.presets import preset

__all__ = ["AUTO", "STRATEGIES", "ContextRequest", "ContextSplit", "split_context"]

STRATEGIES: dict[str, Strategy] = {
    "contiguous": contiguous,
    "head-tail": head_tail,
    "head-tail-document": head_tail_document,
    "by-work": by_work,
    "mixed": mixed,
    "hierarchical": hierarchical,
}
"""Every strategy by name; ties go to the earlier one."""

AUTO = "auto"


def split_context(
    doc_tokens: Sequence[int] | Ints,
    ranks: int,
    strategy: str = AUTO,
    *,
    curve: LoadCurve | None = None,
    tile: int = TILE,
    token_slack: float = 0.02,
    ranks_per_node: int | None = None,
    mask: Mask = CAUSAL,
    price: ContextPrice | None = None,
) -> ContextSplit:
    """Divide the documents of one micro-batch between context-parallel ranks.

    Args:
        doc_tokens: Length of each document, in order [tokens]; may be 0, and the list empty.
        ranks: Context-parallel degree, >= 1.
        strategy: A name in ``STRATEGIES``, or ``auto``.
        curve: Price of a piece; counted FLOP of Llama 3 8B unless given.
        tile: Queries and keys of one attention tile [tokens].
        token_slack: How far a rank's tokens may exceed the mean under ``mixed`` and
            ``hierarchical`` [share of the mean].
        ranks_per_node: Ranks that share a node; ``hierarchical`` needs it.
        mask: Which keys a query reads: causal, full or a window.
        price: Links, speed, heads and what moves, for ``auto``; the assumptions of
            ``equipoise explain`` unless given.

    Raises:
        LayoutError: lengths that are not whole numbers >= 0, fewer than one rank, a slack or
            tile out of range, an unsupported mask, or heads that do not divide.
        SpecError: no strategy has that name.

    Cost: 1 ms for 128K tokens over 16 ranks, and 3 ms over 32. ``auto`` replays schedules: some
        40 ms over 8 ranks and 150 ms over 32.

    >>> split = split_context([1000, 200, 48], ranks=2, strategy="mixed", tile=16)
    >>> split.tokens.tolist(), split.pairs.tolist(), split.travel_tokens.tolist()
    ([624, 624], [255864, 265912], [624, 128])
    >>> split.pieces[1].tolist()  # rows of (document, start, stop)
    [[0, 112, 672], [0, 688, 752]]
    """
    request = ContextRequest(_lengths(doc_tokens), ranks, tile, token_slack, ranks_per_node, mask)
    _check(request)
    curve = _default_curve() if curve is None else curve
    if strategy != AUTO:
        return count_split(strategy, _strategy(strategy)(request), request, curve)
    names = [n for n in STRATEGIES if n != "hierarchical" or ranks_per_node is not None]
    splits = [count_split(name, STRATEGIES[name](request), request, curve) for name in names]
    return (price or ContextPrice()).fastest(splits, request)


@functools.cache
def _default_curve() -> LoadCurve:
    return counted_curve(preset("llama3-8b"))


def _strategy(name: str) -> Strategy:
    if name not in STRATEGIES:
        names = [*STRATEGIES, AUTO]
        raise SpecError(
            f'No context-sharding strategy is called "{name}". Nearest: {nearest(name, names)}. '
            f"All: {', '.join(names)}."
        )
    return STRATEGIES[name]


def _lengths(doc_tokens: Sequence[int] | Ints) -> Ints:
    given = np.asarray(doc_tokens)
    if not given.size:
        return np.zeros(0, dtype=np.int64)
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise LayoutError(
            f"Document lengths are an array of shape {given.shape} of {given.dtype}. Give a flat "
            f"list of whole numbers of tokens."
        )
    lengths = given.astype(np.int64)
    if lengths.min() < 0:
        worst = int(lengths.argmin())
        raise LayoutError(
            f"Document {worst} has {int(lengths[worst]):,} tokens. Give each document 0 tokens or "
            f"more."
        )
    return lengths


def _check(request: ContextRequest) -> None:
    if not is_whole(request.ranks) or request.ranks > MOST_SIZE:
        raise LayoutError(
            f"ranks is {shown(request.ranks)}. Give a whole number from 1 to {MOST_SIZE:,}."
        )
    if request.ranks < 1:
        raise LayoutError(
            f"A context cannot be divided between {request.ranks} ranks. Give 1 or more."
        )
    if request.tile < 1 or not 0 <= request.token_slack < np.inf:
        raise LayoutError(
            f"The tile is {request.tile} tokens and the token slack {request.token_slack:g}. "
            f"Give a tile of 1 or more and a slack of 0 or more."
        )
    if request.mask.kind == "prefix":
        raise LayoutError(
            "Context-parallel ranks cannot divide a shared-prefix mask. Use a causal, full or "
            "window mask, or give the branches as documents."
        )
