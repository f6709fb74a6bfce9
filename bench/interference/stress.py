"""Neighbours: small loops that each use up one resource of a host, by kind.

Every kind runs in a process of its own until it is ended; a level is a number of such processes.
"""

import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from equipoise.fault.interference.metrics import Resource

_MIB = 1 << 20


def _spin(folder: Path) -> None:
    del folder
    count = 0
    while True:
        count = (count * 1103515245 + 12345) % (1 << 31)


def _product(folder: Path) -> None:
    del folder
    square = np.ones((192, 192), dtype=np.float32)
    while True:
        square @ square


def _forks(folder: Path) -> None:
    del folder
    while True:
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)


def _stream(folder: Path) -> None:
    del folder
    source, target = np.ones(8 * _MIB), np.ones(8 * _MIB)
    while True:
        np.copyto(target, source)


def _random(folder: Path) -> None:
    del folder
    words = np.ones(32 * _MIB)
    places = np.random.default_rng(0).integers(0, len(words), 1 << 18)
    while True:
        words.take(places)


def _pages(folder: Path) -> None:
    del folder
    while True:
        with mmap.mmap(-1, 32 * _MIB) as pages:
            for at in range(0, len(pages), mmap.PAGESIZE):
                pages[at] = 1


def _fsync(folder: Path) -> None:
    block = os.urandom(_MIB)
    with tempfile.TemporaryFile(dir=folder) as file:
        while True:
            file.seek(0)
            for _ in range(8):
                file.write(block)
                file.flush()
                os.fsync(file.fileno())


def _small(folder: Path) -> None:
    block = os.urandom(4096)
    with tempfile.NamedTemporaryFile(dir=folder) as named:
        file = os.open(named.name, os.O_WRONLY | os.O_DSYNC)
        while True:
            for at in range(256):
                os.pwrite(file, block, 4096 * at)


def _read(folder: Path) -> None:
    block = os.urandom(_MIB)
    with tempfile.NamedTemporaryFile(dir=folder) as named:
        for _ in range(64):
            named.write(block)
        named.flush()
        os.fsync(named.fileno())
        file = os.open(named.name, os.O_RDONLY | os.O_DIRECT)
        buffer = mmap.mmap(-1, _MIB)
        while True:
            for at in range(64):
                os.preadv(file, [buffer], at * _MIB)


def _tcp(folder: Path) -> None:
    del folder
    server = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(server.getsockname())
    receiver, _ = server.accept()

    def receive() -> None:
        buffer = bytearray(1 << 16)
        while receiver.recv_into(buffer):
            pass

    threading.Thread(target=receive, daemon=True).start()
    block = bytes(1 << 16)
    while True:
        sender.sendall(block)


def _packets(folder: Path) -> None:
    del folder
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.bind(("127.0.0.1", 0))
    address = receiver.getsockname()

    def receive() -> None:
        buffer = bytearray(2048)
        while receiver.recv_into(buffer):
            pass

    threading.Thread(target=receive, daemon=True).start()
    sender, block = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), bytes(64)
    while True:
        sender.sendto(block, address)


KINDS: dict[str, tuple[Resource, Callable[[Path], None]]] = {
    "spin": ("cpu", _spin),
    "product": ("cpu", _product),
    "forks": ("cpu", _forks),
    "stream": ("memory", _stream),
    "random": ("memory", _random),
    "pages": ("memory", _pages),
    "fsync": ("disk", _fsync),
    "small": ("disk", _small),
    "read": ("disk", _read),
    "tcp": ("network", _tcp),
    "packets": ("network", _packets),
}
"""Every kind: the resource that it stresses, and its loop."""
