"""The rows of items that each rank's decoder reads in a step.

What it decides
    Nothing: the pack says which tokens are in which micro-batch, the layout which rank embeds
    them. An item that is cut by a window, or stands in two micro-batches, is encoded once; each
    of its rows goes to whoever reads it.

Kept true (tests/unit/schedule/modality/test_bridge.py, by Hypothesis)
    Every stand-in token of the step is read by one rank, and nothing else is.
"""

from collections.abc import Callable, Sequence

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.schedule.modality.bridge import Readers
from equipoise.spec.layout import Layout, rows_of
from equipoise.spec.modality.items import Items
from equipoise.spec.pack import PackedStep

Embeds = Callable[[int, int], tuple[Ints, Ints]]
"""The rank that embeds each token of a data-parallel rank's micro-batch, and which row of its own
that is, int64 [tokens] each."""


def read_rows(
    packed: PackedStep, items: Items, documents: int, embeds: Embeds
) -> tuple[Ints, Readers]:
    """The items of a step, and who reads their rows.

    Args:
        packed: The step, equal on all ranks.
        items: Those of the corpus.
        documents: Documents of the corpus; repeated ones may have numbers of their own.
        embeds: Says who embeds a token.

    Returns:
        The items of the step, ascending, and the rows that are read.
    """
    parts: list[Ints] = [np.zeros((0, 5), dtype=np.int64)]
    for data_rank, turns in enumerate(packed.ranks):
        for turn, micro_batch in enumerate(turns):
            within = _in_batch(micro_batch.pieces.tolist(), items, documents)
            if len(within):
                ranks, rows = embeds(data_rank, turn)
                place = within[:, 2]
                turns_N = np.full(len(within), turn)
                columns = (within[:, 0], within[:, 1], ranks[place], turns_N, rows[place])
                parts.append(np.stack(columns, axis=1))
    item, item_row, rank, turn_of, row = np.concatenate(parts).T
    chosen, place_of = np.unique(item, return_inverse=True)
    return chosen, Readers(place_of.astype(np.int64), item_row, rank, turn_of, row)


def embedding_places(
    layout: Layout, data_rank: int, shares: Sequence[Ints], *, stage_rank: int = 0
) -> tuple[Ints, Ints]:
    """Who embeds each token of a micro-batch.

    Args:
        layout: Degrees.
        data_rank: The data-parallel rank whose micro-batch it is.
        shares: Tokens of each context rank, int64 [tokens of the share] each.
        stage_rank: The pipeline rank that has the first stage.

    Returns:
        The rank of the world, and which row of its own that is, int64 [tokens] each.

    >>> rank, row = embedding_places(Layout(dp=2, tp=2), 1, [np.arange(3)])
    >>> rank.tolist(), row.tolist()
    ([2, 3, 3], [0, 0, 1])
    """
    rank, row = (np.empty(sum(map(len, shares)), dtype=np.int64) for _ in range(2))
    for cp, rows in enumerate(shares):
        for tp in range(layout.tp):
            kept = rows_of(len(rows), ranks=layout.tp, rank=tp)
            mine = rows[kept.start : kept.stop]
            rank[mine] = layout.rank_at(dp=data_rank, pp=stage_rank, cp=cp, tp=tp)
            row[mine] = np.arange(len(mine))
    return rank, row


def _in_batch(pieces: list[list[int]], items: Items, documents: int) -> Ints:
    """Item, row of the item and place in the micro-batch of each stand-in, int64 [n, 3]."""
    parts: list[Ints] = [np.zeros((0, 3), dtype=np.int64)]
    at = 0
    for number, start, stop in pieces:
        for item in items.within(number % documents, start, stop).tolist():
            begin = int(items.begin[item])
            first, last = max(begin, start), min(begin + int(items.rows[item]), stop)
            token = np.arange(first, last)
            parts.append(
                np.stack((np.full(len(token), item), token - begin, token - start + at), 1)
            )
        at += stop - start
    return np.concatenate(parts)
