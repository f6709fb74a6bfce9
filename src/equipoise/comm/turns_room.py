"""Threads that take turns: one runs at a time, and passes its turn on when it must wait.

What it decides
    The last rank to reach a meeting moves the data of all, in the order of ranks, so results do
    not depend on timing. If all remaining ranks wait, no turn can ever come back, and all end
    with a message that says who waits where.

Kept true (tests/multi/comm/test_turns.py)
    A failing rank, and ranks that wait for each other, end all.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.base.errors import FaultError

Move = Callable[[list[Any]], None]
"""Moves the data of all ranks of a group, given in their order."""


@dataclass(slots=True, eq=False)
class _Wait:
    """Ranks that have passed their turn on, and what they wait for."""

    arrived: threading.Condition
    ranks: list[int] = field(default_factory=list)
    data: dict[int, Any] = field(default_factory=dict)
    is_over: bool = False


_Key = tuple[Any, ...]


class Room:
    """What the ranks of a process share. The running rank holds ``turn``."""

    def __init__(self, ranks: int) -> None:
        self.turn = threading.Lock()
        self.here = threading.local()
        self._ranks = ranks
        self._meetings: dict[_Key, _Wait] = {}
        self._mail: dict[_Key, deque[Tensor]] = defaultdict(deque)
        self._readers: dict[_Key, _Wait] = {}
        self._waiting: dict[int, tuple[str, _Wait]] = {}
        self._ended = 0
        self._fault = ""

    def meet(self, key: _Key, rank: int, of: int, data: Any, move: Move) -> None:
        """Wait for all ranks of a group; the last one moves everybody's data.

        ``key`` names the group and its collective; ``rank`` counts within its ``of`` ranks.
        ``move`` gets the data of all, in the order of ranks.
        """
        meeting = self._meetings.setdefault(key, _Wait(threading.Condition(self.turn)))
        meeting.data[rank] = data
        if len(meeting.data) < of:
            self._hand_on(meeting, f"{key[-1]} of {of} ranks")
            return
        del self._meetings[key]
        with torch.no_grad():
            move([meeting.data[each] for each in range(of)])
        self._release(meeting)

    def send(self, key: _Key, data: Tensor) -> None:
        """Leave a copy for the message's reader."""
        self._mail[key].append(data.detach().clone())
        if key in self._readers:
            self._release(self._readers.pop(key))

    def receive(self, key: _Key, data: Tensor) -> None:
        """Wait for a message."""
        if not self._mail[key]:
            self._readers[key] = _Wait(threading.Condition(self.turn))
            self._hand_on(self._readers[key], "a receive")
        data.detach().copy_(self._mail[key].popleft())

    def end(self, fault: str) -> None:
        """End a rank; if it failed, end all."""
        self._ended += 1
        self._fault = self._fault or fault
        self._look()

    def _hand_on(self, wait: _Wait, name: str) -> None:
        rank: int = self.here.rank
        wait.ranks.append(rank)
        self._waiting[rank] = name, wait
        self._look()
        while not (wait.is_over or self._fault):
            wait.arrived.wait()
        if not wait.is_over:
            raise FaultError(self._fault)

    def _release(self, wait: _Wait) -> None:
        wait.is_over = True
        for rank in wait.ranks:
            del self._waiting[rank]
        wait.arrived.notify_all()

    def _look(self) -> None:
        """Detect that no rank can continue."""
        if self._waiting and len(self._waiting) + self._ended == self._ranks and not self._fault:
            where = ", ".join(
                f"rank {at} in {self._waiting[at][0]}" for at in sorted(self._waiting)
            )
            self._fault = f"All unfinished ranks wait for each other: {where}."
        if self._fault:
            for _, wait in self._waiting.values():
                wait.arrived.notify_all()
