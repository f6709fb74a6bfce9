"""A rank's words to its launcher, without using a disk: its process, its last error, how far it is.

Why
    A rank's journal and its error stream are in the run's folder. If its disk is full or the
    folder is gone, a failing run would end without a message; and a launcher that decides what
    follows a fault must know whether the run had come any further.

What it decides
    The message goes through a local socket without a name in any file system, whose address ranks
    find in an environment variable. Ranks under another launcher have none, and write only to
    their error stream. Only the newest finished step is kept, in a file in memory that the launcher
    has open: a rank never waits to report it, and it takes no room from messages. The kernel holds
    ten of those for a launcher that is busy or stopped.

Kept true (tests/unit/launch/test_last_words.py)
    Messages arrive whole and in order, whatever happens to folders; nobody waits for a listener.
    The last step is known however long the launcher has not listened.

Sources
    Autobinding to an abstract address: unix(7). Files in memory: memfd_create(2).
"""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "EQUIPOISE_LAST_WORDS"

_STEP_FILE, _STEP_BYTES = "equipoise-last-step", 8

_MOST_CHARACTERS = 20_000
"""Most bytes of a message, or of a traceback's end: a datagram holds 200 KB."""

Words = dict[str, Any]


@dataclass(slots=True)
class Heard:
    """What the ranks of one start have said so far."""

    errors: list[Words] = field(default_factory=list)
    met: Callable[[int, int], object] = field(default=lambda *_: None)
    """Called with each rank and its process, as soon as that runs."""
    missed: Callable[[list[int]], object] = field(default=lambda _: None)
    """Called once with ranks that never came while all started, as soon as another rank says so."""
    file: int = -1
    """Where ranks leave the last step; closed after the end."""
    said: int | None = None
    """The last step that came as a message, or was left when the file was closed."""

    @property
    def step(self) -> int | None:
        """The last step that they finished; None before any."""
        left = os.pread(self.file, _STEP_BYTES, 0) if self.file >= 0 else b""
        return int.from_bytes(left, "little") if len(left) == _STEP_BYTES else self.said

    def close(self) -> None:
        """Keep the last step, and nothing open."""
        self.said, file, self.file = self.step, self.file, -1
        os.close(file)


@contextmanager
def listen(show: Callable[[str], object] = str) -> Iterator[tuple[str, Heard]]:
    """Listen to ranks: yields the address for ``VARIABLE``, and what is heard as it grows.

    ``show`` gets sentences for the user at once; nobody does unless given.
    """
    heard = Heard(file=os.memfd_create(_STEP_FILE))
    with closing(heard), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind("")
        address = ear.getsockname()[1:].decode()

        def take() -> None:
            while words := ear.recv(1 << 20):
                with suppress(ValueError):
                    said = json.loads(words)
                    if said["name"] == "step":
                        heard.said = said["step"]
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
            yield f"{address}:/proc/{os.getpid()}/fd/{heard.file}", heard
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
    """Tell the launcher that all ranks have finished a step, without waiting for it."""
    _, _, path = os.environ.get(VARIABLE, "").partition(":")
    if not path:
        return
    try:
        _leave_step(path, step)
    except OSError:  # the launcher keeps its files to itself, or this process may write none
        _send({"name": "step", "step": step}, most_s=0.0)


def _leave_step(path: str, step: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        # Another process may have the number of a launcher that is gone.
        if Path(f"/proc/self/fd/{file}").readlink().name.startswith(f"memfd:{_STEP_FILE}"):
            os.pwrite(file, step.to_bytes(_STEP_BYTES, "little"), 0)
    finally:
        os.close(file)


def say_late(message: str) -> None:
    """Tell the user, through the launcher, that a rank is late or that it has come."""
    _send({"name": "late", "message": message[:_MOST_CHARACTERS]}, most_s=0.0)


def _send(words: Words, *, most_s: float) -> None:
    address, _, _ = os.environ.get(VARIABLE, "").partition(":")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
        mouth.settimeout(most_s)
        mouth.sendto(json.dumps(words).encode(), b"\0" + address.encode())
