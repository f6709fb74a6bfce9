"""Score a packing policy over many steps of real lengths, beside what no policy could beat."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.bound import largest_bin_bound
from equipoise.balance.pack import cut_at_windows, most_tokens, pack_step, skew
from equipoise.cost.curve import LoadCurve
from equipoise.spec.pack import Pieces
from equipoise.spec.run import PackSpec, Policy


@dataclass(frozen=True, slots=True)
class PackScore:
    """One policy over some steps; means over steps unless said otherwise."""

    policy: Policy
    skew: float
    """Heaviest rank over mean, predicted seconds."""
    p95_skew: float
    """95th percentile over steps of the same."""
    gap: float
    """Heaviest rank over the lower bound for whole documents, minus 1."""
    max_tokens_ratio: float
    """Largest micro-batch over its cap, the most over all steps."""
    plan_s: float
    """Seconds to pack a step."""
    documents: int
    """Documents packed, over all steps."""
    fragments: int
    """Pieces beyond one a document, made by this policy."""
    micro_batches: float
    """Micro-batches of each rank."""
    rank_seconds: tuple[float, ...]
    """Predicted seconds of each rank, heaviest first."""


def score_policy(
    policy: Policy, steps: Sequence[Pieces], pack: PackSpec, ranks: int, curve: LoadCurve
) -> PackScore:
    """Pack every step by one policy and score it.

    Args:
        policy: The policy; the one in ``pack`` is not looked at.
        steps: Pieces of each step, as the stream cuts them.
        pack: Windows and caps.
        ranks: Data-parallel ranks.
        curve: Price of a document.
    """
    pack = dataclasses.replace(pack, policy=policy)
    cap = most_tokens(pack)
    if pack.cut == "windows":
        steps = [cut_at_windows(pieces, pack.context_tokens) for pieces in steps]
    skews, gaps, plan_s, loads, ratio = [], [], [], [], 0.0
    fragments, micro_batches = 0, []
    for pieces in steps:
        began = time.perf_counter()
        packed = pack_step(pieces, pack, ranks, curve)
        plan_s.append(time.perf_counter() - began)
        seconds = [
            sum(float(curve.document_ns(b.doc_tokens).sum()) for b in rank if len(b.pieces))
            for rank in packed.ranks
        ]
        whole = curve.document_ns(pieces[:, 2] - pieces[:, 1])
        skews.append(skew(seconds))
        gaps.append(max(seconds) / largest_bin_bound(whole, ranks) - 1)
        loads.append(sorted((value * 1e-9 for value in seconds), reverse=True))
        ratio = max(ratio, *(batch.tokens / cap for batch in packed))
        fragments += sum(len(batch.pieces) for batch in packed) - len(pieces)
        micro_batches.append(packed.micro_batches)
    return PackScore(
        policy=policy,
        skew=float(np.mean(skews)),
        p95_skew=float(np.percentile(skews, 95)),
        gap=float(np.mean(gaps)),
        max_tokens_ratio=ratio,
        plan_s=float(np.mean(plan_s)),
        documents=sum(len(pieces) for pieces in steps),
        fragments=fragments,
        micro_batches=float(np.mean(micro_batches)),
        rank_seconds=tuple(np.mean(loads, axis=0).tolist()),
    )
