"""The picture of items on ranks."""

from pathlib import Path

import numpy as np

from equipoise.balance.modality.deal import deal_items
from equipoise.dash.modality.plot import blocks_of, plot_items


def test_blocks_add_up_to_a_rank_and_the_same_items_make_the_same_file(tmp_path: Path) -> None:
    work = np.array([9, 1, 8, 2, 7], dtype=np.int64)
    dealt = deal_items(work, 2)
    for rank in range(2):
        blocks = blocks_of(work, dealt.owner, rank).tolist()
        assert sum(blocks) == dealt.work[rank]
        assert blocks == sorted(blocks, reverse=True)
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        plot_items(file, [(work, dealt), (work[:0], deal_items(work[:0], 2))], "five items")
    assert files[0].read_bytes() == files[1].read_bytes()
