"""How evenly ranks encode the images and sound of packed steps.

What it decides
    Items of a step are those of its pieces, whichever policy packs them; a policy that lets
    documents wait moves them to later steps. All ranks encode, whatever shares the pack.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from equipoise.balance.modality.deal import deal_items
from equipoise.balance.modality.step import count_work, items_of

if TYPE_CHECKING:
    from equipoise.balance.packing.evaluate import PackedRecord
    from equipoise.spec.modality.items import Items
    from equipoise.spec.run.resolve import ResolvedRun


@dataclass(frozen=True, slots=True)
class ItemScore:
    """Means over the steps that have items."""

    ranks: int
    items: float
    """Items of a step."""
    encoder_skew: float
    """Work of the fullest rank over the mean, dealt by work."""
    encoder_skew_in_turn: float
    """The same if items were dealt in turn."""
    encoder_gap: float
    """How far the fullest rank is above the least possible, relative."""

    def __str__(self) -> str:
        return (
            f"Encoders: {self.items:,.1f} items a step on {self.ranks} ranks, max/mean "
            f"{self.encoder_skew:.3f} by work, {self.encoder_skew_in_turn:.3f} in turn, "
            f"{self.encoder_gap:.1%} above the bound. Ranks meet between encoding and computing, "
            "so packs are evened out without them."
        )


def score_items(
    records: "Sequence[PackedRecord]",
    items: "Items",
    documents: int,
    run: "ResolvedRun",
    ranks: int,
) -> ItemScore | None:
    """How evenly ranks encode the items of a policy's steps; None if no step has any.

    Args:
        records: The packed steps.
        items: Those of the corpus.
        documents: Documents of the corpus.
        run: Its encoders and its decoder's width.
        ranks: All that encode.
    """
    rows = []
    for record in records:
        pieces = np.concatenate([each.pieces for each in record.shares])
        chosen = items_of(pieces, items, documents)
        dealt = deal_items(count_work(items, chosen, run.spec.encoders, run.model.hidden), ranks)
        if dealt.work.any():
            rows.append((len(chosen), dealt.skew, dealt.skew_in_turn, dealt.gap))
    return ItemScore(ranks, *np.mean(rows, axis=0).tolist()) if rows else None
