"""A rank's last error, sent to its launcher without using a disk.

Why
    A rank's journal and its error stream are in the run's folder. If its disk is full or the
    folder is gone, a failing run would end without a message.

What it decides
    The message goes through a local socket without a name in any file system, whose address ranks
    find in an environment variable. Ranks under another launcher have none, and write only to
    their error stream.

Kept true (tests/unit/launch/test_last_words.py)
    Messages arrive whole and in order, whatever happens to folders; nobody waits for a listener.

Sources
    Autobinding to an abstract address: unix(7).
"""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

VARIABLE = "EQUIPOISE_LAST_WORDS"

_MOST_CHARACTERS = 20_000
"""Most bytes of a message, or of a traceback's end: a datagram holds 200 KB."""

Words = dict[str, Any]


@contextmanager
def listen() -> Iterator[tuple[str, list[Words]]]:
    """Listen to ranks: yields the address for ``VARIABLE`` and a growing list of messages."""
    heard: list[Words] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind("")
        address = ear.getsockname()[1:].decode()

        def take() -> None:
            while words := ear.recv(1 << 20):
                with suppress(ValueError):
                    heard.append(json.loads(words))

        listener = threading.Thread(target=take, daemon=True)
        listener.start()
        try:
            yield address, heard
        finally:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
                mouth.sendto(b"", b"\0" + address.encode())  # after all other messages
            listener.join()


def say(words: Words) -> None:
    """Send an error to this rank's launcher, if it listens.

    Args:
        words: With ``rank``, ``name`` ("error" or "exception"), ``type``, ``message``,
            ``exit_code`` and ``traceback``.
    """
    address = os.environ.get(VARIABLE)
    if not address:
        return
    short = words | {
        "message": str(words["message"])[:_MOST_CHARACTERS],
        "traceback": str(words["traceback"])[-_MOST_CHARACTERS:],
    }
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
        mouth.settimeout(5)  # a suspended launcher reads nothing
        mouth.sendto(json.dumps(short).encode(), b"\0" + address.encode())
