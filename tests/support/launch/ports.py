"""Ports that stay free until a test uses them.

The kernel gives out ports of one range: to whoever asks for any, and to each connection that
begins. A port of that range which is free now may be taken by another test before this one uses it,
so these lie below it, and each worker of pytest-xdist has its own.
"""

import itertools
import os
import socket
from pathlib import Path

_FIRST, _STRIDE = 10_000, 500
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_drawn = itertools.count()


def free_port() -> int:
    """A port of this machine that nobody uses, and that no other call of this worker gives."""
    above = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    room = max(1, (above - _FIRST) // _STRIDE)
    for drawn in itertools.islice(_drawn, _STRIDE):
        port = _FIRST + (_worker % room) * _STRIDE + (os.getpid() + drawn) % _STRIDE
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"ports from {_FIRST} on are all in use")
