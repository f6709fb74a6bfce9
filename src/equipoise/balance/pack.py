"""Packing policies: one step's pieces in, every rank's micro-batches out.

Why
    Ranks meet at the end of each step. A pack of equal token counts is a pack of unequal
    work: one document of 8,192 tokens has 32 times the attention of 32 documents of 256.

What it decides
    ``in-order``   the plain baseline: fill windows in order, cut at the edge.
    ``by-tokens``  whole pieces, equal token counts.
    ``by-work``    whole pieces, equal predicted seconds, at most ``max_tokens`` a micro-batch.

    With ``cut = "windows"`` every policy is given the very pieces that in-order makes, so
    that two policies differ in nothing but who computes what: same gradient, other times.

Kept true (tests/unit/balance/test_pack.py, by Hypothesis)
    Each token of the step is in exactly one piece; every rank has the same number of
    micro-batches; no micro-batch is over its cap; pieces are whole except under in-order;
    the answer depends on the arguments alone, so ranks need not ask each other.

Sources
    Packing by work under a token cap: WLB-LLM, arXiv:2503.17924, section 4.1.
"""

from collections.abc import Callable

import numpy as np

from equipoise.balance.partition import partition
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import LoadCurve
from equipoise.cost.work import Ints
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces
from equipoise.spec.run import PackSpec, Policy

Packer = Callable[[Pieces, PackSpec, int, LoadCurve], PackedStep]


def most_tokens(pack: PackSpec) -> int:
    """Most tokens that one micro-batch may hold under this policy."""
    if pack.policy == "in-order":
        return pack.context_tokens
    if pack.max_tokens is not None:
        return pack.max_tokens
    return pack.context_tokens + pack.context_tokens // 4


def _lengths(pieces: Pieces) -> Ints:
    lengths: Ints = pieces[:, 2] - pieces[:, 1]
    return lengths


def cut_at_windows(pieces: Pieces, context_tokens: int) -> Pieces:
    """Cut pieces, laid end to end, at every multiple of ``context_tokens``.

    >>> cut_at_windows(np.array([[7, 0, 3], [9, 2, 7]]), 4).tolist()
    [[7, 0, 3], [9, 2, 3], [9, 3, 7]]
    """
    stops = np.cumsum(_lengths(pieces))
    total = int(stops[-1])
    cuts = np.union1d(stops, np.arange(context_tokens, total, context_tokens))
    starts = np.concatenate(([0], cuts[:-1]))
    owner = np.searchsorted(stops, starts, side="right")
    shift = pieces[owner, 2] - stops[owner]
    return np.stack((pieces[owner, 0], starts + shift, cuts + shift), axis=1)


def pack_in_order(pieces: Pieces, pack: PackSpec, ranks: int, curve: LoadCurve) -> PackedStep:
    """Fill windows of ``context_tokens`` in order and cut at their edges; deal them to ranks."""
    del curve  # a plain pack looks at tokens alone
    cut = cut_at_windows(pieces, pack.context_tokens)
    lengths = _lengths(cut)
    window_of = (np.cumsum(lengths) - lengths) // pack.context_tokens
    windows = -(-int(window_of[-1] + 1) // ranks) * ranks
    batches = [MicroBatch(cut[window_of == index]) for index in range(windows)]
    return PackedStep("in-order", tuple(tuple(batches[rank::ranks]) for rank in range(ranks)))


def _pack_whole(policy: str, pieces: Pieces, loads: Ints, pack: PackSpec, ranks: int) -> PackedStep:
    sizes, cap = _lengths(pieces), most_tokens(pack)
    if len(pieces) < ranks:
        raise LayoutError(
            f"A step of {int(sizes.sum()):,} tokens holds {len(pieces)} documents for {ranks} "
            f"ranks, and {policy} packs whole documents. Smallest changes that fit: "
            f"layout.dp = {len(pieces)}, or a larger pack.step_tokens."
        )
    if int(sizes.max()) > cap:
        raise LayoutError(
            f"A document of {int(sizes.max()):,} tokens is over the {cap:,} tokens that one "
            f"micro-batch may hold. Set pack.max_tokens = {int(sizes.max())}, or a smaller "
            f"pack.context_tokens."
        )
    micro_batches = -(-int(sizes.sum()) // (ranks * pack.context_tokens))
    while True:
        packed = _split(pieces, loads, sizes, ranks, micro_batches, cap)
        if packed is not None:
            return PackedStep(policy, packed)
        micro_batches += 1


def _split(
    pieces: Pieces, loads: Ints, sizes: Ints, ranks: int, micro_batches: int, cap: int
) -> tuple[tuple[MicroBatch, ...], ...] | None:
    """Ranks first, because they wait for each other; then each rank's micro-batches."""
    rank_of = partition(loads, ranks, sizes=sizes, capacity=micro_batches * cap)
    if rank_of is None:
        return None
    packed = []
    for rank in range(ranks):
        mine = np.flatnonzero(rank_of == rank)
        batch_of = partition(loads[mine], micro_batches, sizes=sizes[mine], capacity=cap)
        if batch_of is None:  # by work no room: by size, largest first, fits more
            batch_of = partition(sizes[mine], micro_batches, capacity=cap)
        if batch_of is None:
            return None
        # Heaviest first on every rank, so that the micro-batches of one turn are alike.
        work = np.bincount(batch_of, loads[mine], micro_batches)
        turns = np.lexsort((np.arange(micro_batches), -work))
        packed.append(tuple(MicroBatch(pieces[mine[batch_of == turn]]) for turn in turns))
    return tuple(packed)


def pack_by_tokens(pieces: Pieces, pack: PackSpec, ranks: int, curve: LoadCurve) -> PackedStep:
    """Whole pieces to ranks and micro-batches of nearly equal token counts."""
    del curve
    return _pack_whole("by-tokens", pieces, _lengths(pieces), pack, ranks)


def pack_by_work(pieces: Pieces, pack: PackSpec, ranks: int, curve: LoadCurve) -> PackedStep:
    """Whole pieces to ranks and micro-batches of nearly equal predicted seconds."""
    return _pack_whole("by-work", pieces, curve.document_ns(_lengths(pieces)), pack, ranks)


POLICIES: dict[Policy, Packer] = {
    "in-order": pack_in_order,
    "by-tokens": pack_by_tokens,
    "by-work": pack_by_work,
}


def pack_step(pieces: Pieces, pack: PackSpec, ranks: int, curve: LoadCurve) -> PackedStep:
    """Pack one step's pieces by the policy of ``pack``, cut where ``pack.cut`` says.

    Args:
        pieces: int64 [n, 3] of (document, start, stop); n >= 1.
        pack: Policy, window and caps.
        ranks: Data-parallel ranks.
        curve: Price of a document in seconds, the same on every rank.

    Raises:
        LayoutError: fewer documents than ranks, or a document over the cap.
    """
    if pack.cut == "windows":
        pieces = cut_at_windows(pieces, pack.context_tokens)
    return POLICIES[pack.policy](pieces, pack, ranks, curve)


def rank_seconds(packed: PackedStep, curve: LoadCurve) -> list[float]:
    """Predicted compute of each rank: forward and backward of its micro-batches [s]."""
    return [sum(curve.micro_batch_s(batch.doc_tokens) for batch in rank) for rank in packed.ranks]


def skew(loads: list[float]) -> float:
    """Largest over mean: 1.0 is perfect balance.

    >>> skew([3.0, 1.0])
    1.5
    """
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0
