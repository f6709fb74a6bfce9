"""The items of a step: work by each item's own encoder, one owner, rows to whoever embeds them."""

import numpy as np

from equipoise.balance.modality.step import ROUND_BYTES, count_work, plan_step
from equipoise.schedule.modality.bridge import check_bridge
from equipoise.schedule.modality.readers import embedding_places
from equipoise.spec.layout import Layout
from equipoise.spec.modality.sections import AudioSpec, VisionSpec
from equipoise.spec.pack import MicroBatch, PackedStep
from support.items import make_items

ENCODERS = (VisionSpec(layers=2, hidden=16, heads=1).encoder, AudioSpec(layers=1).encoder)
ITEMS = make_items([[(1, 4, 0), (6, 2, 1)], [], [(0, 9, 0)]])


def test_work_is_counted_by_each_items_own_encoder() -> None:
    work = count_work(ITEMS, np.array([0, 1, 2]), ENCODERS, 24)
    patches = ITEMS.patches
    assert work[[0, 2]].tolist() == ENCODERS[0].multiplications(patches[[0, 2]], 24).tolist()
    assert work[1] == ENCODERS[1].multiplications(patches[[1]], 24)[0]
    only_sound = count_work(ITEMS, np.array([0, 1, 2]), ENCODERS[1:], 24)
    assert only_sound.tolist() == [0, work[1], 0]


def test_rows_go_to_the_ranks_that_embed_their_tokens() -> None:
    layout = Layout(dp=2, tp=2)
    pieces = [np.array([[0, 0, 8], [1, 0, 5]]), np.array([[2, 0, 9]])]
    packed = PackedStep("by-work", tuple((MicroBatch(each),) for each in pieces))

    def embeds(data_rank: int, turn: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = packed.ranks[data_rank][turn].tokens
        return embedding_places(layout, data_rank, [np.arange(tokens)])

    step = plan_step(packed, ITEMS, 3, embeds, ENCODERS, ranks=4, width=24, element_bytes=4)
    check_bridge(step.plan)
    assert step.items.tolist() == [0, 1, 2]
    assert sorted(np.concatenate([step.own(rank) for rank in range(4)]).tolist()) == [0, 1, 2]
    # Tokens 1 to 4, and 6 and 7, of 13 that are cut at 6; and all of 9 that are cut at 4.
    assert step.plan.sent.sum(axis=0).tolist() == [4, 2, 4, 5]
    assert step.plan.rounds == 1
    wide = plan_step(
        packed, ITEMS, 3, embeds, ENCODERS, ranks=4, width=ROUND_BYTES // 8, element_bytes=4
    )
    assert wide.plan.rounds > 1
