"""Messages between the ranks of one engine, over a connection of their own for every two.

Why
    A rank on a processor computes with all cores it has. Gloo's messages pass through a thread of
    each process, which waits for a core that computes: milliseconds for every exchange of every
    layer. Here the thread that computes also sends and receives; while it waits, its core is free
    for nobody but the message.

    Each engine has connections that nobody else knows, and no wait in it is without an end.

What it decides
    What the system's buffers take leaves when it is posted; the rest, and all that arrives, moves
    while this rank waits. What arrives before it is expected is kept.

    On the wire a message is its tag, its size and its bytes.

Kept true (tests/unit/serve/longctx/test_mail.py)
    Messages of any sizes arrive whole, and in order under each tag, whoever posts first; a rank
    that is gone, or silent beyond the deadline, is named.
"""

import itertools
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from equipoise.base.errors import FaultError
from equipoise.comm.mail import Ledger, Mail, Parcel

_HEAD = struct.Struct("<qq")
_BARRIER = -1
"""Tag of a barrier's empty messages, and when they are awaited."""


def connect(ranks: int) -> list[dict[int, socket.socket]]:
    """Connections between every two ranks: for each rank its ends, by the other rank."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for low, high in itertools.combinations(range(ranks), 2):
        ends[low][high], ends[high][low] = _pair()
    return ends


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        while True:
            other, address = server.accept()
            if address == one.getsockname():
                return one, other
            other.close()  # somebody else called


class _Message:
    """One end of a message under way."""

    def __init__(self, peer: int, data: memoryview) -> None:
        self.peer, self.data, self.is_done = peer, data, False


class _Connection:
    """This rank's end of one connection."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.end, self.is_open, self.arrived_bytes = end, True, 0
        self._out: deque[tuple[memoryview, _Message | None]] = deque()
        self._wanted: dict[int, deque[_Message]] = {}
        self._early: dict[int, deque[memoryview]] = {}
        self._head = bytearray(_HEAD.size)
        self._into, self._filled = memoryview(self._head), 0
        self._arriving: tuple[int, _Message | None] | None = None
        """The tag of the message whose bytes come now, and who wants it; None before its head."""

    @property
    def has_more(self) -> bool:
        """Whether something could not be sent yet."""
        return bool(self._out)

    def want(self, tag: int, message: _Message) -> None:
        """Expect a message; it may be here."""
        if early := self._early.get(tag):
            self._deliver(early.popleft(), message)
        else:
            self._wanted.setdefault(tag, deque()).append(message)

    def put(self, tag: int, message: _Message) -> None:
        """Send a message behind those before it, as far as there is room."""
        self._out.append((memoryview(_HEAD.pack(tag, message.data.nbytes)), None))
        self._out.append((message.data, message))

    def move(self) -> bool:
        """Send and receive what can be without waiting; whether anything has arrived."""
        before = self.arrived_bytes
        try:
            self._send()
            self._receive()
        except OSError:
            self.is_open = False
        return self.arrived_bytes > before

    def _send(self) -> None:
        while self._out:
            data, message = self._out[0]
            try:
                sent = self.end.send(data) if data.nbytes else 0
            except BlockingIOError:
                return
            if sent < data.nbytes:
                self._out[0] = data[sent:], message
                continue
            self._out.popleft()
            if message is not None:
                message.is_done = True

    def _receive(self) -> None:
        while True:
            while self._filled == self._into.nbytes:
                self._turn()
            try:
                got = self.end.recv_into(self._into[self._filled :])
            except BlockingIOError:
                return
            if not got:
                raise ConnectionResetError
            self._filled += got
            self.arrived_bytes += got

    def _turn(self) -> None:
        """A head or a message is whole: what comes next."""
        if self._arriving is None:
            tag, size = _HEAD.unpack(self._head)
            wanted = self._wanted.get(tag)
            message = wanted.popleft() if wanted else None
            self._arriving = tag, message
            if message is None:
                self._into = memoryview(bytearray(size))
            else:
                _require_size(message, size)
                self._into = message.data
        else:
            tag, message = self._arriving
            if message is not None:
                message.is_done = True
            elif wanted := self._wanted.get(tag):  # since its head came
                self._deliver(self._into, wanted.popleft())
            else:
                self._early.setdefault(tag, deque()).append(self._into)
            self._arriving, self._into = None, memoryview(self._head)
        self._filled = 0

    def _deliver(self, data: memoryview, message: _Message) -> None:
        _require_size(message, data.nbytes)
        message.data[:] = data
        message.is_done = True


def _require_size(message: _Message, size: int) -> None:
    if size != message.data.nbytes:
        raise FaultError(
            f"rank {message.peer} sent {size:,} bytes where {message.data.nbytes:,} were expected"
        )


class RankMail(Mail):
    """Posts and awaits this rank's messages over connections that only this engine uses."""

    def __init__(self, rank: int, ends: Mapping[int, socket.socket], *, deadline_s: float) -> None:
        """Take this rank's ends.

        Args:
            rank: This one.
            ends: Of its connections, by the other rank; see ``connect``.
            deadline_s: Longest wait for any message [s].
        """
        self._deadline_s = deadline_s
        self.rank, self.ranks, self.ledger = rank, len(ends) + 1, Ledger(len(ends) + 1)
        self._connections = {peer: _Connection(end) for peer, end in ends.items()}
        self._messages: dict[int, list[_Message]] = {}

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Start messages; callers must not touch their tensors until they have been awaited."""
        self.ledger.count(sends, receives)
        self._start(sends, receives)

    def _start(self, sends: Iterable[Parcel], receives: Iterable[Parcel]) -> None:
        for parcels, is_sent in ((receives, False), (sends, True)):
            for parcel in parcels:
                bytes_of: Any = parcel.data.numpy()
                message = _Message(parcel.peer, memoryview(bytes_of))
                line = self._connections[parcel.peer]
                (line.put if is_sent else line.want)(parcel.tag, message)
                self._messages.setdefault(parcel.due, []).append(message)
                if is_sent:
                    line.move()

    def wait(self, due: int) -> None:
        """Wait until all messages due then have been sent and received.

        Raises:
            FaultError: a rank is gone, or the deadline has passed.
        """
        heard_s = time.monotonic()
        pending = self._messages.pop(due, [])
        while pending := [each for each in pending if not each.is_done]:
            heard = [line.move() for line in self._connections.values() if line.is_open]
            if any(heard):
                heard_s = time.monotonic()
            pending = [each for each in pending if not each.is_done]
            for each in pending:
                if not self._connections[each.peer].is_open:
                    raise FaultError(f"rank {self.rank} lost its connection to rank {each.peer}")
            left_s = heard_s + self._deadline_s - time.monotonic()
            if pending and left_s <= 0:
                raise FaultError(
                    f"rank {self.rank} waited {self._deadline_s:g} s for rank {pending[0].peer}"
                )
            if pending:
                self._sleep(left_s)

    def _sleep(self, most_s: float) -> None:
        """Until something can move."""
        poll = select.poll()
        for line in self._connections.values():
            if line.is_open:
                poll.register(line.end, select.POLLIN | (select.POLLOUT if line.has_more else 0))
        poll.poll(1000 * most_s + 1)

    def barrier(self) -> None:
        """Wait for every rank.

        Raises:
            FaultError: as ``wait``.
        """
        nothing = torch.empty(0, dtype=torch.uint8)
        both = [Parcel(peer, _BARRIER, nothing, _BARRIER) for peer in self._connections]
        self._start(both, both)
        self.wait(_BARRIER)

    def close(self) -> None:
        """Close this rank's ends."""
        for line in self._connections.values():
            line.end.close()
