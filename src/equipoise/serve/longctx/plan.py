"""Who computes which new tokens of an iteration, and the attention over them.

Why
    Beside a prompt, texts that generate have one new token each. The executor's calls and copies
    take several times as long for a single query as its products, text by text and layer by layer;
    all single queries together are one call (``gathered``).

What it decides
    Single tokens go to the keys, longer chunks as ``strategy`` says: each kind has its own plan.
    A rank's rows are those of longer chunks, then the single ones. Where nothing gathers
    (``gathers``), all texts are of the one kind.

Kept true (tests/multi/serve/test_longctx.py)
    Logits are those of one process; bytes between ranks are those of both schedules.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from equipoise.balance.context.continued import ContinuedPlan, plan_continued
from equipoise.base.arrays import Ints
from equipoise.serve.longctx.choice import GATHERED
from equipoise.serve.longctx.message import RankWork


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTexts:
    """Some texts of an iteration."""

    texts: Ints
    """Their numbers, int64."""
    strategy: str
    """What moves between ranks."""
    plan: ContinuedPlan
    """Who computes what, as if these were all texts."""


@dataclass(frozen=True, slots=True, eq=False)
class IterationPlan:
    """All texts of an iteration."""

    longer: PlannedTexts | None
    """Those whose attention the executor computes."""
    single: PlannedTexts | None
    """Those with one new token, whose queries go to the keys."""
    rows: tuple[Ints, ...]
    """Rows of all texts' new tokens, by rank: those of longer chunks, then the single ones."""
    key_tokens: tuple[Ints, ...]
    """Tokens of each text of which each rank has keys afterwards, int64 [texts]."""

    def __iter__(self) -> Iterator[PlannedTexts]:
        return (each for each in (self.longer, self.single) if each is not None)


def plan_iteration(work: RankWork, *, heads: int, kv_heads: int) -> IterationPlan:
    """Place the new tokens of an iteration; the same on every rank.

    Args:
        work: What is to be computed.
        heads: Query heads.
        kv_heads: Key/value heads.
    """
    new, cached = np.array(work.new, dtype=np.int64), np.array(work.cached, dtype=np.int64)
    first = np.cumsum(new) - new
    is_single = (new == 1) & work.gathers
    kinds = list[PlannedTexts | None]()
    rows: list[list[Ints]] = [[] for _ in range(cached.shape[1])]
    key_tokens = np.zeros_like(cached)
    for texts, strategy in (
        (np.flatnonzero(~is_single), work.strategy),
        (np.flatnonzero(is_single), GATHERED),
    ):
        if not len(texts):
            kinds.append(None)
            continue
        counts = new[texts]
        plan = plan_continued(
            cached[texts].tolist(), counts.tolist(), strategy, heads=heads, kv_heads=kv_heads
        )
        shift = first[texts] - (np.cumsum(counts) - counts)
        among_all = np.arange(counts.sum()) + np.repeat(shift, counts)
        for rank, own in enumerate(plan.rows):
            rows[rank].append(among_all[own])
        key_tokens[texts] = np.stack(plan.key_tokens, axis=1)
        kinds.append(PlannedTexts(texts, strategy, plan))
    longer, single = kinds
    return IterationPlan(
        longer, single, tuple(map(np.concatenate, rows)), tuple(np.ascontiguousarray(key_tokens.T))
    )
