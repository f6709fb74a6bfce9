"""Messages between the ranks of one engine, over a process group of its own.

Why
    torch's default process group is a global of the process, and its deadline is that of training.
    Each engine has a group that nobody else knows, and no wait in it is without an end.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from equipoise.base.errors import FaultError
from equipoise.comm.mail import Ledger, Mail, Parcel


class GroupMail(Mail):
    """Posts and awaits this rank's messages over a gloo group that only this engine uses."""

    def __init__(self, folder: Path, rank: int, ranks: int, *, deadline_s: float) -> None:
        """Join the other ranks.

        Args:
            folder: Where ranks meet; empty.
            rank: This one.
            ranks: All of them.
            deadline_s: Longest wait for any message [s].

        Raises:
            RuntimeError: a rank does not come.
        """
        store = dist.FileStore(str(folder / "store"), ranks)
        self._deadline = timedelta(seconds=deadline_s)
        store.set_timeout(self._deadline)
        self.rank, self.ranks, self.ledger = rank, ranks, Ledger(ranks)
        self._group: Any = dist.ProcessGroupGloo(store, rank, ranks, self._deadline)
        self._works: dict[int, list[tuple[dist.Work, Parcel]]] = {}

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Start messages; callers must not touch their tensors until they have been awaited."""
        self.ledger.count(sends, receives)
        for parcel in receives:
            work = self._group.recv([parcel.data], parcel.peer, parcel.tag)
            self._works.setdefault(parcel.due, []).append((work, parcel))
        for parcel in sends:
            work = self._group.send([parcel.data], parcel.peer, parcel.tag)
            self._works.setdefault(parcel.due, []).append((work, parcel))

    def wait(self, due: int) -> None:
        """Wait until all messages due then have been sent and received.

        Raises:
            FaultError: a rank is gone, or the deadline has passed.
        """
        for work, parcel in self._works.pop(due, ()):
            begin_s = time.monotonic()
            try:
                work.wait(self._deadline)
            except RuntimeError as error:
                raise FaultError(self._explain(parcel.peer, time.monotonic() - begin_s)) from error

    def _explain(self, peer: int, waited_s: float) -> str:
        deadline_s = self._deadline.total_seconds()
        if waited_s < deadline_s:
            return f"rank {self.rank} lost its connection to rank {peer}"
        return f"rank {self.rank} waited {deadline_s:g} s for rank {peer}"

    def barrier(self) -> None:
        """Wait for every rank."""
        self._group.barrier().wait(self._deadline)
