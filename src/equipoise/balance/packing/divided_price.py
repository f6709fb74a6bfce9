"""The cost of a pack of divided documents: its slowest rank, with what travels to it.

Why
    Finer cuts always look more even, but every cut sends keys and values. A packer that counts
    only evenness cuts a thousand times where sixty cuts suffice.

What it decides
    The price by which packers choose: predicted compute of the slowest rank, plus the time to
    bring the keys and values of each token that a rank reads but does not hold.

    If no link is known, a token's keys and values take ``TRAVEL_SHARE`` of the time of its
    linear layers, forward and backward. Llama 3 8B has 131 kB per token in bf16, and four times
    that moves in total; at 40 GB/s and 400 TFLOP/s that is 0.11. A part that reads others pays
    ``MESSAGE_TOKENS`` tokens for its messages: some 10 us for each of 128 in 32 layers.

Kept true (tests/unit/balance/packing/test_divided_price.py)
    What travels is what ``equipoise pack`` counts; whole documents receive nothing.

Sources
    Rates: ``bench/local/groups.py``; bytes: ``balance.groups.cost.kv_ring``.
"""

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.cost.curve import LoadCurve
from equipoise.spec.pack import PackedStep

TRAVEL_SHARE = 0.1
"""Time to bring a token's keys and values, as a share of its linear layers' time."""

MESSAGE_TOKENS = 100
"""Tokens whose travel takes as long as the message overhead of one part of a document."""


def travel_ns_of(curve: LoadCurve, travel_ns: float | None) -> float:
    """Time to bring one token's keys and values; by default a share of its linear layers [ns]."""
    return TRAVEL_SHARE * curve.ns_per_token if travel_ns is None else travel_ns


def cell_rows(packed: PackedStep) -> tuple[Ints, Ints]:
    """Every piece with its micro-batch.

    Returns:
        int64 [pieces], each piece's micro-batch, ``turn x ranks + rank``; and int64 [pieces, 4],
        its document, start, stop and the first token that it reads.
    """
    cells, rows = [], [np.zeros((0, 4), dtype=np.int64)]
    for rank, batches in enumerate(packed.ranks):
        for turn, batch in enumerate(batches):
            cells.append(np.full(len(batch.pieces), turn * len(packed.ranks) + rank))
            rows.append(np.column_stack((batch.pieces, batch.begins)))
    return np.concatenate([np.zeros(0, dtype=np.int64), *cells]), np.concatenate(rows)


def missing_tokens(cell_of: Ints, rows: Ints, cells: int) -> tuple[Ints, Ints]:
    """Count what each micro-batch's pieces read but it does not hold.

    ``cell_of`` and ``rows`` are those of ``cell_rows``.

    Returns:
        Tokens, and documents that they belong to, of each micro-batch, int64 [cells].

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
    # A corpus shorter than a step repeats; the second copy reads nothing of the first.
    np.add.at(missing, unique[:, 0], np.maximum(reach - held, 0))
    np.add.at(documents, unique[:, 0], reach > held)
    return missing, documents


def price_ns(
    packed: PackedStep, curve: LoadCurve, *, travel_ns: float, meets_each_turn: bool
) -> int:
    """Time of the slowest rank, travel included; or the sum of each turn's slowest rank [ns]."""
    ranks, turns = len(packed.ranks), packed.micro_batches
    cell_of, rows = cell_rows(packed)
    loads = curve.slice_ns(rows[:, 1] - rows[:, 3], rows[:, 2] - rows[:, 3])
    spent = np.bincount(cell_of, loads, ranks * turns)
    tokens, documents = missing_tokens(cell_of, rows, ranks * turns)
    spent += np.rint(travel_ns * (tokens + MESSAGE_TOKENS * documents))
    table = spent.reshape(turns, ranks) + round(curve.fixed_ns)
    return int(table.max(1).sum() if meets_each_turn else table.sum(0).max())
