"""Asynchronous messages between the ranks of one group, all counted.

Why
    What is sent must be what the schedule says. Every message between ranks passes here, where
    its bytes are counted.

What it decides
    Messages are posted together and awaited when due, so some may stay in flight while later
    ones are posted.

Kept true (tests/multi/parallel/test_context.py)
    Bytes and messages counted equal those of the schedule, link by link.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A message, as one of its two ends posts it."""

    peer: int
    """Rank within the group at the other end."""
    tag: int
    """Distinguishes messages between the same two ranks; equal at both ends."""
    data: torch.Tensor
    """What is sent, or where it arrives: contiguous, uint8 [bytes]."""
    due: int
    """When it is awaited: see ``Mail.wait``."""


@dataclass(slots=True, eq=False)
class Ledger:
    """What this rank has sent and received, by peer."""

    ranks: int
    sent_bytes: npt.NDArray[np.int64] = field(init=False)
    sent_messages: npt.NDArray[np.int64] = field(init=False)
    received_bytes: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.sent_bytes, self.sent_messages, self.received_bytes = (
            np.zeros(self.ranks, dtype=np.int64) for _ in range(3)
        )

    def count(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Count messages as they are posted."""
        for parcel in sends:
            self.sent_bytes[parcel.peer] += parcel.data.nbytes
            self.sent_messages[parcel.peer] += 1
        for parcel in receives:
            self.received_bytes[parcel.peer] += parcel.data.nbytes


class Mail:
    """Posts and awaits this rank's messages over one process group."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, ledger: Ledger | None = None
    ) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.group)
        self.ranks = dist.get_world_size(self.group)
        self.ledger = Ledger(self.ranks) if ledger is None else ledger
        self._under_way: dict[int, list[tuple[dist.Work, list[Parcel]]]] = {}

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Start messages; callers must not touch their tensors until they have been awaited."""
        self.ledger.count(sends, receives)
        for due in sorted({parcel.due for parcel in (*sends, *receives)}):
            ops = [self._op(p, is_sent=False) for p in receives if p.due == due]
            ops += [self._op(p, is_sent=True) for p in sends if p.due == due]
            kept = [p for p in (*receives, *sends) if p.due == due]  # gloo holds no reference
            works = dist.batch_isend_irecv(ops)
            self._under_way.setdefault(due, []).extend((work, kept) for work in works)

    def wait(self, due: int) -> None:
        """Wait until all messages due then have been sent and received."""
        for work, parcels in self._under_way.pop(due, ()):
            work.wait()
            del parcels  # ``comm.progress`` reads it from outside during the wait

    def _op(self, parcel: Parcel, *, is_sent: bool) -> dist.P2POp:
        return dist.P2POp(
            dist.isend if is_sent else dist.irecv,
            parcel.data,
            group=self.group,
            tag=parcel.tag,
            group_peer=parcel.peer,
        )
