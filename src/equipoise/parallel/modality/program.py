"""What a rank does for the items of one step: which it encodes, sends, receives and reads.

What it decides
    Nothing: every rank computes the same plan from the pack, by integers, and compares its digest
    with the others' before a byte is sent.

Kept true (tests/multi/parallel/test_modality.py)
    Ranks whose plans differ are named on every rank, and nothing is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from equipoise.balance.modality.deal import Dealt, deal_items
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.comm.meet import name_ranks
from equipoise.schedule.modality.bridge import BridgePlan, plan_bridge
from equipoise.schedule.modality.readers import Embeds, read_rows
from equipoise.spec.modality.items import Items
from equipoise.spec.pack import PackedStep

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

    def own(self, rank: int) -> Ints:
        """Items of the corpus that a rank encodes, ascending."""
        return self.items[self.plan.items_of(rank)]


def plan_step(
    packed: PackedStep,
    items: Items,
    documents: int,
    embeds: Embeds,
    work: Callable[[Ints], Ints],
    *,
    ranks: int,
    row_bytes: int,
) -> ModalityStep:
    """Deal a step's items to the ranks, and say what travels.

    Args:
        packed: The step, equal on all ranks.
        items: Those of the corpus.
        documents: Documents of the corpus.
        embeds: Who embeds a token.
        work: Operations of items of the corpus.
        ranks: All ranks; each encodes.
        row_bytes: Bytes of one row.
    """
    chosen, readers = read_rows(packed, items, documents, embeds)
    dealt = deal_items(work(chosen), ranks)
    rows = max(1, ROUND_BYTES // row_bytes)
    plan = plan_bridge(readers, dealt.owner, items.rows[chosen], ranks=ranks, round_rows=rows)
    return ModalityStep(chosen, dealt, plan)


def require_one_bridge(plan: BridgePlan, step: int, ranks: Ranks) -> None:
    """Refuse a step whose items ranks have dealt otherwise; every rank calls it.

    Raises:
        LayoutError: on every rank; names those that differ from rank 0.
    """
    numbers = ranks.gather_integers([int(plan.digest[:15], 16)]).flatten()
    differing = np.flatnonzero(numbers.numpy() != int(numbers[0])).tolist()
    if differing:
        named = name_ranks(differing)
        raise LayoutError(
            f"{named[0].upper()}{named[1:]} dealt the images and sound of step {step} otherwise "
            f"than rank 0. Nothing was sent or changed by it. Give every machine the same corpus "
            f"and the same version of equipoise and of NumPy."
        )
