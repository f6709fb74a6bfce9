"""How many bytes each link between two ranks has carried, and for how long it had some to carry.

Why
    A slow link makes its ranks wait as a slow rank does, and nothing that a rank times tells the
    two apart. The kernel knows: it counts, for each connection, the seconds in which bytes were
    waiting to be sent or acknowledged, and those in which the receiver had no room for them.

What it decides
    Nothing is sent and nothing in a step is timed: this reads the counters of the process's own TCP
    connections (``TCP_INFO``), whichever library opened them. A connection from rank a to rank b is
    the one that b has from the other end.

    Links that are not TCP connections of the ranks' own processes (shared memory, NVLink,
    InfiniBand) do not show here.

    Those seconds are counted in ticks of the kernel (1 to 10 ms), and a message counts as on its
    way until the other end has acknowledged it: that takes a core, and where nothing is sent back
    it waits for 40 ms in vain. So what each rank waited for a core is left beside them, and the
    kernel's own rate of delivery: a low one is sampled only while there is more to send.

Kept true (tests/unit/observe/test_links.py, tests/multi/fault/test_slow_link.py)
    Bytes are those that were sent; a receiver that reads late does not make its link slow.

Sources
    ``struct tcp_info`` of Linux 4.10 and later, include/uapi/linux/tcp.h: ``tcpi_bytes_acked``,
    ``tcpi_delivery_rate``, ``tcpi_busy_time``, ``tcpi_rwnd_limited``. How rates of delivery are
    sampled: net/ipv4/tcp_rate.c there.
"""

import os
import socket
import stat
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_INFO_BYTES = 192
_RESENT, _ACKED, _DELIVERED, _BUSY, _NO_ROOM = (
    (100, "I"),
    (120, "Q"),
    (160, "Q"),
    (168, "Q"),
    (176, "Q"),
)
"""Offsets and formats of ``tcpi_total_retrans``, and of the four of the sources above."""


@dataclass(frozen=True, slots=True)
class LinkTotals:
    """What one rank has sent to another so far."""

    sent_bytes: int = 0
    """Acknowledged by the other end."""
    busy_s: float = 0.0
    """With bytes on their way, and room for them at the other end."""
    resent: int = 0
    """Packets that were sent again."""
    delivery_rate: float = 0.0
    """What the slowest connection delivered when the kernel last sampled it [bytes/s], or 0."""
    delays_s: tuple[float, float] = (0.0, 0.0)
    """Seconds for which threads of the sender, and of the receiver, were ready and had no core."""

    def __add__(self, other: "LinkTotals") -> "LinkTotals":
        """Join two connections of one link."""
        return LinkTotals(
            self.sent_bytes + other.sent_bytes,
            self.busy_s + other.busy_s,
            self.resent + other.resent,
            min(filter(None, (self.delivery_rate, other.delivery_rate)), default=0.0),
            max(self.delays_s, other.delays_s),
        )


Links = Mapping[tuple[int, int], LinkTotals]
"""By the ranks that send and receive."""

Row = tuple[str, str, int, float, int, int]
"""A connection: own and other address, and its ``LinkTotals``."""


def read_connections() -> list[Row]:
    """This process's TCP connections; none where the system does not count."""
    rows = []
    for connection in open_sockets():
        with suppress(OSError, struct.error):
            rows += _read(connection)
    return rows


def open_sockets() -> Iterator[socket.socket]:
    """Copies of this process's sockets, each closed when the next is asked for."""
    descriptors = Path("/proc/self/fd")
    for entry in descriptors.iterdir() if descriptors.exists() else ():
        with suppress(OSError):
            number = int(entry.name)
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as connection:
                    yield connection


def _read(connection: socket.socket) -> list[Row]:
    is_tcp = connection.type == socket.SOCK_STREAM and connection.family in (
        socket.AF_INET,
        socket.AF_INET6,
    )
    if not is_tcp:
        return []
    own, other = (f"{each[0]}:{each[1]}" for each in _names(connection))
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    resent, acked, rate, busy, no_room = (
        struct.unpack_from(form, info, at)[0]
        for at, form in (_RESENT, _ACKED, _DELIVERED, _BUSY, _NO_ROOM)
    )
    return [(own, other, acked, max(0, busy - no_room) / 1e6, resent, rate)]


def _names(connection: socket.socket) -> tuple[tuple[str, int], tuple[str, int]]:
    own, other = connection.getsockname(), connection.getpeername()
    return (own[0], own[1]), (other[0], other[1])


def join_links(
    rows: Mapping[int, Iterable[Row]], delays_s: Mapping[int, float] = MappingProxyType({})
) -> dict[tuple[int, int], LinkTotals]:
    """Links between ranks, from every rank's connections and its threads' waits for a core [s].

    >>> one, other = [("a:1", "b:2", 9, 0.5, 0, 90)], [("b:2", "a:1", 4, 0.1, 0, 80)]
    >>> join_links({0: one, 1: other})[1, 0].sent_bytes
    4
    """
    owner = {(own, other): rank for rank, each in rows.items() for own, other, *_ in each}
    links: dict[tuple[int, int], LinkTotals] = defaultdict(LinkTotals)
    for rank, each in rows.items():
        for own, other, sent_bytes, busy_s, resent, rate in each:
            peer = owner.get((other, own))
            if peer is not None and peer != rank:
                waited_s = delays_s.get(rank, 0.0), delays_s.get(peer, 0.0)
                links[rank, peer] += LinkTotals(sent_bytes, busy_s, resent, rate, waited_s)
    return dict(links)
