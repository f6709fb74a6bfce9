"""Read what was appended to a journal since the last look, whole lines only.

Why
    A dashboard looks every second at files that grow to gigabytes. It must read each byte once,
    and must never take half a line for a line.

What it decides
    A line counts when its newline is there, or when it is already a whole event. Far from the
    file's end spans are passed over unparsed: they are nine lines in ten, and only the newest are
    drawn. A file that became shorter, or another file, is said to be replaced.

Kept true (tests/unit/dash/web/test_tail.py)
    A journal that is written in arbitrary cuts, and read after each, gives the events of the whole.
"""

from collections.abc import Iterator
from pathlib import Path

from equipoise.observe.journal_lines import Event, parse_line

CHUNK_BYTES = 1 << 18
_MOST_LINE_BYTES = 1 << 26
"""A longer line is damage."""
NEAR_BYTES = 4 << 20
"""Nearer to the end than this, every line is parsed."""

_SPAN = b'{"v":1,"kind":"span"'


class Tail:
    """One journal file and how far it has been read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.size = 0
        self.changed_s = 0.0
        """When the file last changed [unix seconds, by the file system's clock]."""
        self.torn_lines = 0
        self._line = 0
        self._identity: tuple[int, int] | None = None
        self._pending = 0
        """Size of the file when its last, unfinished line was looked at."""

    @property
    def has_more(self) -> bool:
        """Whether there are bytes that nobody has looked at."""
        return self.size > max(self.offset, self._pending)

    def look(self) -> bool:
        """Update the size; False if the file was replaced or cut short since it was read.

        Raises:
            OSError: no such file, or it cannot be examined.
        """
        facts = self.path.stat()
        identity = facts.st_dev, facts.st_ino
        is_same = self._identity in (None, identity) and facts.st_size >= self.offset
        self._identity, self.size, self.changed_s = identity, facts.st_size, facts.st_mtime
        return is_same

    def read(self) -> Iterator[Event]:
        """The events of the next chunk.

        Raises:
            OSError: the file cannot be read.
            DataError: a newer equipoise wrote it.
        """
        data, is_end = self._chunk()
        whole = data.rfind(b"\n") + 1
        is_far = self.size - self.offset > NEAR_BYTES
        for line in data[:whole].splitlines(keepends=True):
            self._line += 1
            if not line.strip() or (is_far and _is_plain_span(line)):
                continue
            event, is_torn = parse_line(line, self.path, self._line)
            self.torn_lines += is_torn
            if event is not None:
                yield event
        self.offset += whole
        rest = data[whole:]
        if is_end and rest:
            self._pending = self.size
            event, is_torn = parse_line(rest, self.path, self._line + 1)
            if event is not None:  # whole but for its newline, which will read as an empty line
                self.torn_lines += is_torn
                self.offset += len(rest)
                yield event

    def _chunk(self) -> tuple[bytes, bool]:
        """Bytes from the offset with a newline among them, and whether they reach the end."""
        want = CHUNK_BYTES
        with self.path.open("rb") as file:
            while True:
                file.seek(self.offset)
                data = file.read(want)
                if len(data) < want or b"\n" in data:
                    return data, len(data) < want
                if want >= _MOST_LINE_BYTES:
                    self.torn_lines += 1
                    self.offset += len(data)
                    return b"", False
                want *= 2


def _is_plain_span(line: bytes) -> bool:
    """Whether a line is one span and nothing else, by its ends."""
    return line.startswith(_SPAN) and line.endswith(b"}\n") and line.rfind(b'{"v"') == 0
