"""Deal fast memory to the rows with the most traffic for a byte, over all tables together.

Why
    Traffic differs a thousandfold between rows. Memory given to tables by their size serves rows
    that nobody reads.

What it decides
    Slots for each table. Rows are taken by bandwidth density (lookups for a byte) until the memory
    is full, over all tables together; a table has as many slots as it has rows among them. With
    records of one size no choice serves more lookups; otherwise at most one record's are missing.

Kept true (tests/unit/balance/test_table_tiers.py, by Hypothesis)
    Lookups served equal brute force where records have one size, and are within one record of it
    elsewhere; slots fit the memory.

Sources
    Bandwidth density: MTrainS, arXiv:2305.01515.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import SpecError


@dataclass(frozen=True, slots=True)
class TierAnswer:
    """Slots of fast memory."""

    slots: dict[str, int]
    """For each table."""
    served: dict[str, float]
    """Share of each table's lookups that the densest of its rows take, as many as have slots."""
    held_bytes: int


def deal_slots(
    counts: Mapping[str, Ints], record_bytes: Mapping[str, int], memory_bytes: int
) -> TierAnswer:
    """Deal fast memory to tables.

    Args:
        counts: For each table, lookups of each row, int64 [rows].
        record_bytes: For each table, bytes of a row in fast memory, with what finds it there.
        memory_bytes: Fast memory.

    Raises:
        SpecError: the memory is negative.

    Cost: O(n log n) in the rows of all tables.

    >>> deal_slots({"a": np.array([9, 1]), "b": np.array([4, 6])}, {"a": 8, "b": 8}, 16).slots
    {'a': 1, 'b': 1}
    """
    if memory_bytes < 0:
        raise SpecError(f"A memory of {memory_bytes:,} bytes cannot be. Give 0 or more.")
    names = list(counts)
    density = [counts[name] / record_bytes[name] for name in names]
    owner = np.repeat(np.arange(len(names)), [len(each) for each in density])
    order = np.argsort(-np.concatenate(density), kind="stable") if names else np.empty(0, np.int64)
    sizes = np.array([record_bytes[name] for name in names], dtype=np.int64)
    ends = np.cumsum(sizes[owner[order]])
    taken = int(np.searchsorted(ends, memory_bytes, side="right"))
    slots = np.bincount(owner[order[:taken]], minlength=len(names))
    served = {}
    for name, count in zip(names, slots.tolist(), strict=True):
        top = np.sort(counts[name])[::-1]
        served[name] = float(top[:count].sum() / max(1, top.sum()))
    held = int((slots * sizes).sum())
    return TierAnswer(dict(zip(names, slots.tolist(), strict=True)), served, held)
