"""A rank's words to its launcher, without using a disk: its process, its last error, how far it is.

Why
    A rank's journal and its error stream are in the run's folder. If its disk is full or the
    folder is gone, a failing run would end without a message; and a launcher that decides what
    follows a fault must know whether the run had come any further.

What it decides
    The message goes through a local socket without a name in any file system, whose address ranks
    find in an environment variable. Ranks under another launcher have none, and write only to
    their error stream. Only the newest finished step is kept, and a rank never waits to report it.

Kept true (tests/unit/launch/test_last_words.py)
    Messages arrive whole and in order, whatever happens to folders; nobody waits for a listener.

Sources
    Autobinding to an abstract address: unix(7).
"""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

VARIABLE = "EQUIPOISE_LAST_WORDS"

_MOST_CHARACTERS = 20_000
"""Most bytes of a message, or of a traceback's end: a datagram holds 200 KB."""

Words = dict[str, Any]


@dataclass(slots=True)
class Heard:
    """What the ranks of one start have said so far."""

    errors: list[Words] = field(default_factory=list)
    step: int | None = None
    """The last step that they finished; None before any."""
    met: Callable[[int, int], object] = field(default=lambda *_: None)
    """Called with each rank and its process, as soon as that runs."""
    missed: Callable[[list[int]], object] = field(default=lambda _: None)
    """Called once with ranks that never came while all started, as soon as another rank says so."""


@contextmanager
def listen(show: Callable[[str], object] = str) -> Iterator[tuple[str, Heard]]:
    """Listen to ranks: yields the address for ``VARIABLE``, and what is heard as it grows.

    ``show`` gets sentences for the user at once; nobody does unless given.
    """
    heard = Heard()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind("")
        address = ear.getsockname()[1:].decode()

        def take() -> None:
            while words := ear.recv(1 << 20):
                with suppress(ValueError):
                    said = json.loads(words)
                    if said["name"] == "step":
                        heard.step = said["step"]
                    elif said["name"] == "process":
                        heard.met(said["rank"], said["process"])
                    elif said["name"] == "late":
                        show(said["message"])
                    else:
                        is_first = not any(each.get("missing") for each in heard.errors)
                        heard.errors.append(said)
                        if said.get("missing") and is_first:
                            heard.missed(said["missing"])

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
            ``exit_code`` and ``traceback``; ``missing`` if ranks never came while all started.
    """
    short = words | {
        "message": str(words["message"])[:_MOST_CHARACTERS],
        "traceback": str(words["traceback"])[-_MOST_CHARACTERS:],
    }
    _send(short, most_s=5.0)  # a suspended launcher reads nothing


def say_process(rank: int) -> None:
    """Tell the launcher that this process is a rank, so that it sees its end at once."""
    _send({"name": "process", "rank": rank, "process": os.getpid()}, most_s=5.0)


def say_step(step: int) -> None:
    """Tell the launcher that all ranks have finished a step; never waits, so it may be lost."""
    _send({"name": "step", "step": step}, most_s=0.0)


def say_late(message: str) -> None:
    """Tell the user, through the launcher, that a rank is late or that it has come."""
    _send({"name": "late", "message": message[:_MOST_CHARACTERS]}, most_s=0.0)


def _send(words: Words, *, most_s: float) -> None:
    address = os.environ.get(VARIABLE)
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
        mouth.settimeout(most_s)
        mouth.sendto(json.dumps(words).encode(), b"\0" + address.encode())
