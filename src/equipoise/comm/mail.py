"""Asynchronous messages between the ranks of one group, all counted.

Why
    What is sent must be what the schedule says. Every message between ranks passes here, where
    its bytes are counted.

What it decides
    Messages are posted together and awaited when due, so some may stay in flight while later
    ones are posted.

    Gloo tells messages of a link apart by their tags. NCCL has no tags: it matches what two ranks
    post in order, and what one rank posts to one communicator runs in order as well, so a send
    that nobody receives yet would hold up the receive behind it. ``LinkGroups`` therefore gives
    each direction of each link a communicator of its own, in which order alone tells messages
    apart::

        rank 0 -> 1    up  {0, 1}        rank 1 -> 0    down  {0, 1}

Kept true (tests/multi/parallel/test_context.py, tests/multi/comm/test_links.py)
    Bytes and messages counted equal those of the schedule, link by link; over ``LinkGroups``,
    without tags, attention and pipelines equal one rank as well.

Sources
    torch 2.13, ``ProcessGroupNCCL::pointToPoint``: tags are ignored, and an unbatched message
    uses a communicator of its two ranks, made when both first post to it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from equipoise.base.errors import FaultError
from equipoise.comm.meter import WaitMeter


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
    meter: WaitMeter = field(init=False)

    def __post_init__(self) -> None:
        self.sent_bytes, self.sent_messages, self.received_bytes = (
            np.zeros(self.ranks, dtype=np.int64) for _ in range(3)
        )
        self.meter = WaitMeter()

    def count(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Count messages as they are posted."""
        for parcel in sends:
            self.sent_bytes[parcel.peer] += parcel.data.nbytes
            self.sent_messages[parcel.peer] += 1
        for parcel in receives:
            self.received_bytes[parcel.peer] += parcel.data.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class LinkGroups:
    """Two process groups of the same ranks: for messages to higher ranks, and to lower ones."""

    up: dist.ProcessGroup
    down: dist.ProcessGroup

    def toward(self, *, is_up: bool) -> dist.ProcessGroup:
        """The group of one direction."""
        return self.up if is_up else self.down

    def open(self, device: torch.device) -> None:
        """Make every link's communicator; all ranks of the groups call it.

        Two ranks make theirs when both post a first message, and wait for each other meanwhile. In
        the middle of a schedule ranks could wait in a circle; in one order of links they cannot.
        """
        rank, ranks = dist.get_rank(self.up), dist.get_world_size(self.up)
        for low, high in itertools.combinations(range(ranks), 2):
            if rank not in (low, high):
                continue
            peer, is_low = (high, True) if rank == low else (low, False)
            for group, is_sender in ((self.up, is_low), (self.down, not is_low)):
                word = torch.zeros(1, dtype=torch.uint8, device=device)
                _start(word, group, peer, is_sent=is_sender).wait()


def _start(data: torch.Tensor, group: dist.ProcessGroup, peer: int, *, is_sent: bool) -> dist.Work:
    work: dist.Work | None = (
        dist.isend(data, group=group, group_dst=peer)
        if is_sent
        else dist.irecv(data, group=group, group_src=peer)
    )
    if work is None:
        raise FaultError(f"This process is not in the group of the message for rank {peer}.")
    return work


class Mail:
    """Posts and awaits this rank's messages over one process group."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        ledger: Ledger | None = None,
        links: LinkGroups | None = None,
    ) -> None:
        """Messages of ``group``, over ``links`` where messages have no tags."""
        self.group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.group)
        self.ranks = dist.get_world_size(self.group)
        self.ledger = Ledger(self.ranks) if ledger is None else ledger
        self._links = links
        self._under_way: dict[int, list[tuple[dist.Work, list[Parcel]]]] = {}

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Start messages; callers must not touch their tensors until they have been awaited."""
        self.ledger.count(sends, receives)
        if self._links is not None:
            self._post_in_order(self._links, sends, receives)
            return
        for due in sorted({parcel.due for parcel in (*sends, *receives)}):
            ops = [self._op(p, is_sent=False) for p in receives if p.due == due]
            ops += [self._op(p, is_sent=True) for p in sends if p.due == due]
            kept = [p for p in (*receives, *sends) if p.due == due]  # gloo holds no reference
            works = dist.batch_isend_irecv(ops)
            self._under_way.setdefault(due, []).extend((work, kept) for work in works)

    def _post_in_order(
        self, links: LinkGroups, sends: Sequence[Parcel], receives: Sequence[Parcel]
    ) -> None:
        for parcels, is_sent in ((receives, False), (sends, True)):
            for parcel in parcels:
                group = links.toward(is_up=(self.rank < parcel.peer) == is_sent)
                work = _start(parcel.data, group, parcel.peer, is_sent=is_sent)
                self._under_way.setdefault(parcel.due, []).append((work, [parcel]))

    def wait(self, due: int) -> None:
        """Wait until all messages due then have been sent and received."""
        with self.ledger.meter.wait():
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
