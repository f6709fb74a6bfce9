"""Micro-batches of data-parallel ranks that wait for each other in every one.

Why
    Where ranks meet in each turn (``Layout.meets_each_turn``), a turn takes as long as its
    heaviest micro-batch, whichever rank has it::

        rank 0   |####|##  |        the step is 4 + 5,
        rank 1   |##  |#####|       not the 7 of the rank that has most

What it decides
    Which micro-batch stands for each turn: the one of most useful FLOP, the lowest rank's of
    equal ones.

Kept true (tests/unit/sim/test_turns.py)
    No rank's own sum is more; where ranks do not meet, nothing changes.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from equipoise.cost.work import layer_pairs, useful_flop
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec

Batch = TypeVar("Batch")

Rows = Sequence[Sequence[Sequence[int]]]
"""Lengths of the documents of each data-parallel rank's micro-batches."""


def heaviest_turns(rows: Sequence[Sequence[Batch]], work: Callable[[Batch], int]) -> list[Batch]:
    """The heaviest micro-batch of each turn, the lowest rank's of equal ones.

    Args:
        rows: Micro-batches of each data-parallel rank, as many of each.
        work: Useful FLOP of a micro-batch.

    >>> heaviest_turns([[4, 2], [2, 5]], lambda batch: batch)
    [4, 5]
    """
    return [max(turn, key=work) for turn in zip(*rows, strict=True)]


def slowest_turns(model: ModelSpec, layout: Layout, rows: Rows) -> Rows:
    """One rank that has the heaviest micro-batch of each turn; all ranks where none wait.

    Args:
        model: What a document's work is counted for.
        layout: Says whether ranks meet in each turn.
        rows: Micro-batches of each data-parallel rank.

    >>> from equipoise.spec.model.presets import preset
    >>> rows = [[[4], [2]], [[2], [5]]]
    >>> slowest_turns(preset("2m"), Layout(dp=2, zero=3), rows)
    [[[4], [5]]]
    """
    if not _wait(layout, rows):
        return rows

    def work(batch: Sequence[int]) -> int:
        lengths = np.asarray(batch, dtype=np.int64)
        return useful_flop(model, int(lengths.sum()), layer_pairs(model, lengths))

    return [heaviest_turns(rows, work)]


def fullest_turns(layout: Layout, rows: Rows) -> list[int] | None:
    """Most tokens that any rank holds in each turn; None where ranks do not wait.

    >>> fullest_turns(Layout(dp=2, zero=3), [[[4], [2]], [[2, 3], [5]]])
    [5, 5]
    """
    if not _wait(layout, rows):
        return None
    return [max(map(sum, turn)) for turn in zip(*rows, strict=True)]


def _wait(layout: Layout, rows: Rows) -> bool:
    """Whether these ranks wait for each other in each turn."""
    return len(rows) > 1 and layout.meets_each_turn and len({len(row) for row in rows}) == 1
