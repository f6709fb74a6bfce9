"""Samples divided over ranks or over time, by the packing policies that divide documents.

What it decides
    ``divided`` over data-parallel ranks, ``divided-in-time`` in a pipeline; both as
    ``balance.packing`` has them. A piece reads the keys of its sample's tokens before it, which
    lie in other micro-batches: on the ranks of its turn, or earlier on its own rank.

Kept true (tests/unit/balance/batches/test_divided.py, by Hypothesis)
    Each token is in one piece; the cap holds; all pieces of a sample share a turn, or follow each
    other on one rank.
"""

import numpy as np

from equipoise.balance.batches.arguments import count_samples
from equipoise.balance.packing.pack import batch_ns, pack_step
from equipoise.balance.packing.turns import align_turns
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import LoadCurve
from equipoise.spec.pack import PackedStep
from equipoise.spec.run.spec import PackSpec


def divide(
    tokens: Ints,
    curve: LoadCurve,
    *,
    ranks: int,
    turns: int,
    cap: int,
    in_time: bool,
    meets_each_turn: bool,
) -> PackedStep:
    """Divide a batch's samples where that makes ranks even.

    Args:
        tokens: Length of each sample, int64 [samples].
        curve: Price of a sample and of its parts.
        ranks: Data-parallel ranks.
        turns: Micro-batches of each rank; one more each time the cap leaves no room.
        cap: Most tokens of a micro-batch.
        in_time: Whether parts lie in a rank's own micro-batches, one after the other.
        meets_each_turn: Whether ranks wait for each other in every micro-batch.

    Raises:
        LayoutError: the cap leaves no room.
    """
    every = np.arange(len(tokens))
    pieces = np.stack((every, np.zeros_like(tokens), tokens), axis=1)
    window = max(2, -(-int(tokens.sum()) // (ranks * turns)))
    spec = PackSpec(
        policy="divided-in-time" if in_time else "divided",
        context_tokens=window,
        step_tokens=max(2, int(tokens.sum())),
        max_tokens=max(cap, window),
    )
    try:
        packed = pack_step(pieces, spec, ranks, curve, meets_each_turn=meets_each_turn)
    except LayoutError:
        raise LayoutError(
            f"{count_samples(len(tokens))} of up to {int(tokens.max()):,} tokens cannot be divided "
            f"over {ranks} ranks with {cap:,} tokens in a micro-batch. Give a larger max_tokens or "
            f"more ranks."
        ) from None
    return packed if in_time else align_turns(packed)


def seconds_of(packed: PackedStep, curve: LoadCurve) -> list[list[float]]:
    """Predicted seconds of each micro-batch, by rank; 0 for an empty one."""
    return [
        [
            1e-9 * (curve.fixed_ns + batch_ns(batch, curve)) * bool(len(batch.pieces))
            for batch in rank
        ]
        for rank in packed.ranks
    ]
