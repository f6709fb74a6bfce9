"""The journal's writer: append-only JSON lines, written out at every step.

Why
    The run is worth more than its journal: a full disk, or a file that somebody moved, must not
    end a training that needs no disk for its next step.

What it decides
    Writing never raises. What the disk refuses waits in memory and is retried at every flush;
    beyond ``_MOST_WAITING_BYTES`` new lines are dropped and counted, and a ``journal`` fault
    marks the gap. If the file at its path was replaced, a new one is started there, unless the
    run's folder is gone too. Each such event is one sentence for the user (``take_notices``).
    Once newer ranks have taken the folder (``observe.fence``), nothing is written any more.

Kept true (tests/unit/observe/test_journal.py, tests/unit/observe/test_journal_disk.py)
    A killed writer leaves whole lines and at most one torn last line; an appended journal never
    joins a new event to a torn one; delayed lines arrive whole and in order.
"""

import errno
import json
import math
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from equipoise.base.disk import explain_refusal
from equipoise.base.errors import FaultError
from equipoise.observe.event import SCHEMA_VERSION, Kind, journal_name, seal
from equipoise.observe.fence import Fence

_CHUNK_BYTES = 1 << 13
"""Bytes that are written out without waiting for a flush."""

_MOST_WAITING_BYTES = 16 << 20
"""Most bytes of lines kept while the disk refuses them: thousands of steps."""


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _ends_torn(path: Path) -> bool:
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


@dataclass(slots=True)
class Span:
    """A block of one rank's time."""

    duration_s: float = 0.0


def _identity(folder: Path) -> tuple[int, int] | None:
    """A folder's identity, which survives a move; None if there is no folder."""
    try:
        facts = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return facts.st_dev, facts.st_ino


class EventSink:
    """Where a rank's events go; this one measures spans and keeps nothing."""

    def write(self, kind: Kind, name: str, *, t: float | None = None, **fields: Any) -> None:
        """Take one event; ``t`` is now unless given."""

    def flush(self) -> None:
        """Pass on what was taken so far."""

    @contextmanager
    def phase(self, name: str, **fields: Any) -> Iterator[None]:
        """Be in a block whose time is measured elsewhere; nothing is written here."""
        del name, fields
        yield

    @contextmanager
    def span(self, name: str, **fields: Any) -> Iterator[Span]:
        """Append how long the block took, even if it fails; ``Span`` has it afterwards."""
        span, wall, start = Span(), time.time(), time.perf_counter()
        try:
            with self.phase(name, **fields):
                yield span
        finally:
            span.duration_s = time.perf_counter() - start
            self.write("span", name, t=wall, duration_s=span.duration_s, **fields)


class Journal(EventSink):
    """Writes one rank's facts, in the order in which they happen."""

    def __init__(self, folder: Path, rank: int, fence: Fence | None = None) -> None:
        self.path = folder / journal_name(rank)
        self.rank, self.fence = rank, fence
        self.begun_anew = 0
        """How often a new file had to be started."""
        self._waiting = bytearray()
        self._is_mid_line = False
        self._lost_lines = 0
        self._refusal: OSError | None = None
        self._notices: list[str] = []
        self._file = -1
        self._home: tuple[int, int] | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._home = _identity(folder.parent)
            if self._open():
                self._waiting += b"\n"
        except OSError as error:
            raise FaultError(
                f"The journal {self.path} cannot be written "
                f"({explain_refusal(error, self.path)}). Make its folder writable, or choose "
                f"another with --out."
            ) from error

    def write(self, kind: Kind, name: str, *, t: float | None = None, **fields: Any) -> None:
        """Append one event; ``t`` is now unless given."""
        event = {
            "v": SCHEMA_VERSION,
            "kind": kind,
            "name": name,
            "t": time.time() if t is None else t,
            "rank": self.rank,
            **fields,
        }
        line = seal(json.dumps(_finite(event), separators=(",", ":"))).encode() + b"\n"
        if len(self._waiting) + len(line) > _MOST_WAITING_BYTES:
            self._lost_lines += 1
            return
        self._waiting += line
        if self._refusal is None and len(self._waiting) >= _CHUNK_BYTES and not self.is_passed:
            self._write_out()

    def flush(self) -> None:
        """Pass everything written so far to the operating system; what it refuses waits."""
        if self._file < 0 or self.is_passed:
            return
        try:
            if change := self._change():
                self._begin_anew(change)
        except OSError as error:
            self._refuse(error)
        else:
            self._write_out()

    @property
    def is_passed(self) -> bool:
        """Whether newer ranks write to the run's folder, so that these may not."""
        return self.fence is not None and self.fence.is_passed

    def take_notices(self) -> list[str]:
        """Sentences about this journal for the user, since the last call."""
        notices, self._notices = self._notices, []
        return notices

    @property
    def has_notices(self) -> bool:
        """Whether there is anything for the user to know."""
        return bool(self._notices)

    def follow(self, folder: Path) -> None:
        """Continue in another folder: where this one was moved, or what replaces it."""
        self.path = folder / self.path.name
        self._home = None
        self.flush()

    @property
    def unwritten_lines(self) -> int:
        """Lines not on disk: waiting or dropped."""
        return self._waiting.count(b"\n") + self._lost_lines

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        if self._file >= 0:
            with suppress(OSError):
                os.close(self._file)
            self._file = -1

    def _open(self) -> bool:
        """Open the file at the path; return whether its last line is torn."""
        if self.path.exists() and not stat.S_ISREG(self.path.stat().st_mode):
            raise OSError(errno.EINVAL, "It is not a regular file")
        is_torn = _ends_torn(self.path)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(self.path, flags, 0o666)
        self._size = os.fstat(self._file).st_size
        return is_torn

    def _change(self) -> str:
        """What happened to the file since it was opened; empty if nothing."""
        own = os.fstat(self._file)
        try:
            there = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return "has vanished: it was deleted or moved away"
        if (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            return "was replaced by another file"
        if own.st_size < self._size:
            return f"was cut short, from {self._size:,} to {own.st_size:,} bytes"
        return ""

    def _begin_anew(self, change: str) -> None:
        folder = self.path.parent
        if self._home is not None and self._home != _identity(folder.parent):
            raise FileNotFoundError(errno.ENOENT, f"Its folder {folder.parent} has vanished")
        folder.mkdir(parents=self._home is None, exist_ok=True)
        self._home = _identity(folder.parent)
        before = self._file
        is_torn = self._open()
        with suppress(OSError):
            os.close(before)
        if self._is_mid_line:  # its beginning is in the old file
            del self._waiting[: self._waiting.index(b"\n") + 1]
            self._lost_lines += 1
            self._is_mid_line = False
        if is_torn:
            self._waiting[:0] = b"\n"
        self.begun_anew += 1
        message = f"The journal {self.path} {change}. The run goes on and writes a new one there."
        self._notices.append(message)
        self.write("fault", "journal", message=message)

    def _write_out(self) -> None:
        try:
            while self._waiting:
                count = os.write(self._file, self._waiting[: 1 << 20])
                self._is_mid_line = self._waiting[count - 1] != ord("\n")
                del self._waiting[:count]
            self._size = os.fstat(self._file).st_size
        except OSError as error:
            self._refuse(error)
            return
        if self._refusal is not None:
            self._resume()

    def _refuse(self, error: OSError) -> None:
        known, self._refusal = self._refusal, error
        if known is not None and known.errno == error.errno:
            return
        message = (
            f"The journal {self.path} cannot be written ({explain_refusal(error, self.path)}). "
            f"The run goes on; lines wait in memory until they can be written."
        )
        self._notices.append(message)
        self.write("fault", "journal", message=message)

    def _resume(self) -> None:
        lost, self._lost_lines, self._refusal = self._lost_lines, 0, None
        message = f"The journal {self.path} can be written again; {lost:,} of its lines are lost."
        self._notices.append(message)
        if lost:
            self.write("fault", "journal", message=message, lost_lines=lost)
            self._write_out()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def note(run: Path, rank: int, kind: Kind, name: str, **fields: Any) -> None:
    """Append one event to a rank's journal from beside its work, as far as that can be done.

    Args:
        run: The run's folder. Where it is gone nothing is made: that would pass for another run's.
        rank: Whose journal.
        kind: Of the event.
        name: Likewise.
        fields: Likewise.
    """
    if run.is_dir():
        with suppress(OSError, FaultError), Journal(run / "journal", rank) as journal:
            journal.write(kind, name, **fields)
