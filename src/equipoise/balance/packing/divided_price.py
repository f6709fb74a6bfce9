"""What a pack of divided documents costs: its slowest rank, with what travels to it.

Why
    Cutting finer always looks more even, and every cut sends keys and values. A packer that
    counts only evenness cuts a thousand times where sixty cuts would do.

What it decides
    The price by which packers choose between answers: predicted compute of the slowest rank, and
    of each token whose keys and values a rank reads and does not hold, the time to bring them.

    Where no link is known a token's keys and values take ``TRAVEL_SHARE`` of what its linear
    layers compute, forward and backward. Llama 3 8B's are 131 kB a token in bf16, and four times
    as many bytes move in all; over 40 GB/s beside 400 TFLOP/s that is 0.11. A part that reads
    others pays for its messages as much as for ``MESSAGE_TOKENS`` tokens: some 10 us for each of
    the 128 that it exchanges in 32 layers.

Kept true (tests/unit/balance/packing/test_divided_price.py)
    What travels is what ``equipoise pack`` counts; nothing travels to whole documents.

Sources
    Rates: ``bench/local/groups.py``; bytes: ``balance.groups.cost.kv_ring``.
"""

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.cost.curve import LoadCurve
from equipoise.spec.pack import PackedStep

TRAVEL_SHARE = 0.1
"""Time to bring a token's keys and values, over the time of its linear layers."""

MESSAGE_TOKENS = 100
"""Tokens whose travel takes as long as the messages of one part of a document by themselves."""


def travel_ns_of(curve: LoadCurve, travel_ns: float | None) -> float:
    """Time to bring one token's keys and values, by default a share of its linear layers [ns]."""
    return TRAVEL_SHARE * curve.ns_per_token if travel_ns is None else travel_ns


def cell_rows(packed: PackedStep) -> tuple[Ints, Ints]:
    """Every piece with its micro-batch.

    Returns:
        int64 [pieces]: micro-batch of each piece, ``turn x ranks + rank``; and int64 [pieces, 4]:
        document, start, stop, first token that it reads.
    """
    cells, rows = [], [np.zeros((0, 4), dtype=np.int64)]
    for rank, batches in enumerate(packed.ranks):
        for turn, batch in enumerate(batches):
            cells.append(np.full(len(batch.pieces), turn * len(packed.ranks) + rank))
            rows.append(np.column_stack((batch.pieces, batch.begins)))
    return np.concatenate([np.zeros(0, dtype=np.int64), *cells]), np.concatenate(rows)


def missing_tokens(cell_of: Ints, rows: Ints, cells: int) -> tuple[Ints, Ints]:
    """What the pieces of each micro-batch read and it does not hold.

    Args:
        cell_of: As ``cell_rows`` returns it.
        rows: Likewise.
        cells: Micro-batches.

    Returns:
        Of each micro-batch the tokens, and the documents that they belong to, int64 [cells].

    >>> cut = np.array([[7, 0, 600, 0], [7, 600, 1000, 0]])
    >>> [each.tolist() for each in missing_tokens(np.array([0, 1]), cut, 2)]
    [[0, 600], [0, 1]]
    """
    missing, documents = np.zeros((2, cells), dtype=np.int64)
    late = rows[rows[:, 1] > rows[:, 3]]
    if not len(late):
        return missing, documents
    some = np.flatnonzero(np.isin(rows[:, 0], late[:, 0]))
    names = np.column_stack((cell_of[some], rows[some, 0], rows[some, 3]))
    unique, owner = np.unique(names, axis=0, return_inverse=True)
    owner = owner.reshape(-1)
    reach = np.zeros(len(unique), dtype=np.int64)
    np.maximum.at(reach, owner, rows[some, 2] - rows[some, 3])
    held = np.bincount(owner, rows[some, 2] - rows[some, 1], len(unique)).astype(np.int64)
    # A corpus shorter than a step comes twice; the second copy misses nothing of the first.
    np.add.at(missing, unique[:, 0], np.maximum(reach - held, 0))
    np.add.at(documents, unique[:, 0], reach > held)
    return missing, documents


def price_ns(
    packed: PackedStep, curve: LoadCurve, *, travel_ns: float, meets_each_turn: bool
) -> int:
    """Time of the slowest rank with what travels to it, or of the slowest of each turn [ns].

    Args:
        packed: Any step.
        curve: Price of a document.
        travel_ns: To bring one token's keys and values.
        meets_each_turn: Ranks wait for each other in every micro-batch.
    """
    ranks, turns = len(packed.ranks), packed.micro_batches
    cell_of, rows = cell_rows(packed)
    loads = curve.slice_ns(rows[:, 1] - rows[:, 3], rows[:, 2] - rows[:, 3])
    spent = np.bincount(cell_of, loads, ranks * turns)
    tokens, documents = missing_tokens(cell_of, rows, ranks * turns)
    spent += np.rint(travel_ns * (tokens + MESSAGE_TOKENS * documents))
    table = spent.reshape(turns, ranks) + round(curve.fixed_ns)
    return int(table.max(1).sum() if meets_each_turn else table.sum(0).max())
