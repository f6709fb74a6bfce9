"""The items of one step: what each costs, who encodes it, and what crosses to its readers.

What it decides
    Nothing of its own: ``deal`` says who encodes, the pack who reads. Ranks that train, plans and
    explanations call the same function, so that what is priced is what runs.

Kept true (tests/unit/balance/modality/test_step.py, tests/multi/parallel/test_modality.py)
    Work is counted by each item's own encoder; bytes that ranks send are those planned here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.modality.deal import Dealt, deal_items
from equipoise.base.arrays import Flags, Ints
from equipoise.schedule.modality.bridge import BridgePlan, plan_bridge
from equipoise.schedule.modality.readers import Embeds, read_rows
from equipoise.spec.modality.encoder import KINDS, EncoderSpec
from equipoise.spec.modality.items import Items
from equipoise.spec.pack import PackedStep, Pieces

ROUND_BYTES = 16 << 20
"""Most bytes of rows that a rank sends or receives at a time: a message of this size is as fast
as a longer one, and two of them are little beside a step's activations."""


@dataclass(frozen=True, slots=True, eq=False)
class ModalityStep:
    """The items of a step on all ranks."""

    items: Ints
    """Those of the corpus that the step has, int64 [items of the step]."""
    dealt: Dealt
    plan: BridgePlan
    returning: Flags
    """Whether each of the plan's rows is of an encoder that trains something, bool [rows read]."""
    back: BridgePlan
    """Those rows, whose gradients return."""
    returns: bool
    """Whether any encoder trains something, items or not."""

    @property
    def messages(self) -> int:
        """Messages of all ranks on the bridge, there and back."""
        return (self.plan.messages + self.back.messages) // 2

    def bytes(self, width: int, *, element_bytes: int) -> Ints:
        """Bytes that each rank sends to each on the bridge, there and back, int64 [ranks, ranks].

        Args:
            width: Hidden width of the decoder.
            element_bytes: Of one number.
        """
        total: Ints = (self.plan.away + self.back.away.T) * width * element_bytes
        return total

    def own(self, rank: int) -> Ints:
        """Items of the corpus that a rank encodes, ascending."""
        return self.items[self.plan.items_of(rank)]


def items_of(pieces: Pieces, items: Items, documents: int) -> Ints:
    """Items of which some token lies in some piece, each once, ascending.

    Args:
        pieces: Of the step; documents that repeat may have numbers of their own.
        items: Those of the corpus.
        documents: Documents of the corpus.
    """
    parts = [items.within(each[0] % documents, each[1], each[2]) for each in pieces.tolist()]
    return np.unique(np.concatenate([np.zeros(0, np.int64), *parts]))


def count_work(items: Items, chosen: Ints, encoders: Sequence[EncoderSpec], width: int) -> Ints:
    """Multiplications of items in a forward pass, int64 [chosen]; 0 where nothing encodes them.

    Args:
        items: Those of the corpus.
        chosen: Some of them.
        encoders: Each of another kind.
        width: Hidden width of the decoder.
    """
    work = np.zeros(len(chosen), dtype=np.int64)
    patches, kind = items.patches[chosen], items.kind[chosen]
    for encoder in encoders:
        is_kind = kind == KINDS.index(encoder.kind)
        work[is_kind] = encoder.multiplications(patches[is_kind], width)
    return work


def plan_step(
    packed: PackedStep,
    items: Items,
    documents: int,
    embeds: Embeds,
    encoders: Sequence[EncoderSpec],
    *,
    ranks: int,
    width: int,
    element_bytes: int,
) -> ModalityStep:
    """Deal a step's items to the ranks, and say what travels.

    Args:
        packed: The step, equal on all ranks.
        items: Those of the corpus.
        documents: Documents of the corpus.
        embeds: Who embeds a token.
        encoders: Each of another kind.
        ranks: All ranks; each encodes.
        width: Hidden width of the decoder.
        element_bytes: Of one number of a row.
    """
    chosen, readers = read_rows(packed, items, documents, embeds)
    dealt = deal_items(count_work(items, chosen, encoders, width), ranks)
    rows = max(1, ROUND_BYTES // (width * element_bytes))
    sizes = {"ranks": ranks, "round_rows": rows}
    plan = plan_bridge(readers, dealt.owner, items.rows[chosen], **sizes)
    trained = [KINDS.index(each.kind) for each in encoders if not each.is_frozen]
    returning = np.isin(items.kind[chosen], trained)[plan.readers.item]
    back = plan
    if len(trained) < len(encoders):
        back = plan_bridge(plan.readers.some(returning), dealt.owner, items.rows[chosen], **sizes)
    return ModalityStep(chosen, dealt, plan, returning, back, len(trained) > 0)
