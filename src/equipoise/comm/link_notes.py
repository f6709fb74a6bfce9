"""What links between ranks have carried, left in the store and joined on rank 0.

What it decides
    When. What is left, ``observe.links`` reads; which link is slow, ``fault.detect.links`` says.

Kept true (tests/multi/fault/test_slow_link.py)
    Rank 0 hears of the links of all ranks, and no other rank does.
"""

import json
import time
from collections.abc import Callable

import torch.distributed as dist

from equipoise.observe.links import Links, join_links, read_connections
from equipoise.observe.machine import process_delay_s

_PERIOD_S, _RANK_PERIOD_S = 0.5, 0.01
"""Between looks [s]; longer with many ranks, whose rows rank 0 reads."""


class LinkNotes:
    """Leaves one rank's connections in the store; on rank 0 also joins those of all.

    Args:
        rank: This rank.
        world: Number of ranks.
        hear: Takes the links of all ranks, on rank 0; nobody does unless given.
    """

    def __init__(self, rank: int, world: int, hear: Callable[[Links], object] | None) -> None:
        self._rank, self._world, self._hear = rank, world, hear
        self._period_s = max(_PERIOD_S, _RANK_PERIOD_S * world)
        self._looked = time.monotonic()

    def look(self, store: dist.Store) -> None:
        """Read and leave the connections, if that is due; the store's errors are raised."""
        now = time.monotonic()
        if self._hear is None or now - self._looked < self._period_s:
            return
        self._looked = now
        note = {"rows": read_connections(), "delay_s": process_delay_s()}
        store.set(f"links/{self._rank}", json.dumps(note))
        if self._rank != 0:
            return
        keys = {rank: f"links/{rank}" for rank in range(self._world)}
        notes = {r: json.loads(store.get(key)) for r, key in keys.items() if store.check([key])}
        rows = {rank: note["rows"] for rank, note in notes.items()}
        self._hear(join_links(rows, {rank: note["delay_s"] for rank, note in notes.items()}))
