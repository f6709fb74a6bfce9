"""Read a line of JSON whose strings are too long to be held several times over.

Why
    ``json.loads`` holds a line as bytes, as text and as values: a document of 500 MB on one line
    took 5.5 GB.

What it decides
    Quotes and backslashes alone say where a string of JSON begins and ends. So each long string
    is taken out of the line and a short name put in its place; what is left goes through the
    ordinary parser, which sees every key, number and bracket. A long string is then decoded from
    its bytes, a piece at a time. A line of many short values is held whole.

Kept true (tests/unit/data/cache/test_long_line.py, by Hypothesis)
    Whatever the line, its values are those of ``json.loads``, or both refuse it.

Sources
    Strings and escapes: RFC 8259, section 7.
"""

import codecs
import json
import re
import uuid
from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO

from equipoise.base.read import parse_json

LONG_LINE_BYTES = 16 << 20
"""Shorter lines are parsed whole."""
_LONG_STRING_BYTES = 1 << 20
"""Shorter strings are parsed with the rest of their line."""
_PIECE_BYTES = 4 << 20

_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
"""What stands between two quotes."""
_BEGINS_LIST = re.compile(rb"[ \t\r\n]*\[")
_NO_FIRST_BYTE = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that begin no character."""


class LongString:
    """A string of a JSON line, still in its bytes."""

    def __init__(self, line: bytearray, start: int, stop: int, piece_bytes: int) -> None:
        """``line[start:stop]`` stands between its quotes."""
        self._line, self._start, self._stop = line, start, stop
        self._piece_bytes = piece_bytes

    def pieces(self) -> Iterator[str]:
        """The string in consecutive pieces, none empty; no surrogate pair is divided.

        Raises:
            json.JSONDecodeError: it has a control character, or an escape that JSON lacks.
            UnicodeDecodeError: it is not UTF-8.
        """
        escaped, held, done = "", "", 0
        for text in chain(self._texts(), [""]):
            escaped += text
            stop = _whole_escapes(escaped) if text else len(escaped)
            piece = held + self._unescape(escaped[:stop], done)
            escaped, held, done = escaped[stop:], "", done + stop
            if text and piece and "\ud800" <= piece[-1] <= "\udbff":
                piece, held = piece[:-1], piece[-1]
            if piece:
                yield piece

    def check(self) -> None:
        """Decode it and keep nothing.

        Raises:
            json.JSONDecodeError, UnicodeDecodeError: as ``pieces``.
        """
        for _ in self.pieces():
            pass

    @property
    def characters(self) -> int:
        """Characters between its quotes, escapes as they are written."""
        return _characters(self._line, self._start, self._stop)

    def _texts(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        for at in range(self._start, self._stop, self._piece_bytes):
            end = min(at + self._piece_bytes, self._stop)
            begin = at - len(decoder.getstate()[0])
            try:
                yield decoder.decode(bytes(self._line[at:end]), final=end == self._stop)
            except UnicodeDecodeError as error:
                raise _not_utf8(self._line, begin, error) from None

    def _unescape(self, escaped: str, done: int) -> str:
        try:
            return str(json.loads(f'"{escaped}"'))
        except json.JSONDecodeError as error:
            at = _characters(self._line, 0, self._start) + done + error.pos - 1
            raise json.JSONDecodeError(error.msg, "", at) from None


def read_line(file: BinaryIO, long_bytes: int = LONG_LINE_BYTES) -> bytes | bytearray:
    """The next line of a file; a bytearray if it is a long one."""
    line = file.readline(long_bytes)
    if len(line) < long_bytes or line.endswith(b"\n"):
        return line
    whole = bytearray(line)
    while not whole.endswith(b"\n") and (more := file.readline(long_bytes)):
        whole += more  # grows in place, where readline() would join a copy
    return whole


def skip_line(file: BinaryIO, long_bytes: int = LONG_LINE_BYTES) -> None:
    """Read to the end of a line and keep nothing."""
    while (part := file.readline(long_bytes)) and not part.endswith(b"\n"):
        pass


def parse_long_line(
    line: bytearray, *, long_bytes: int = _LONG_STRING_BYTES, piece_bytes: int = _PIECE_BYTES
) -> tuple[Any, dict[str, LongString]]:
    """Parse a line of JSON, all but its long strings.

    Args:
        line: UTF-8, without a mark of byte order. A list of any length is read as an empty one.
        long_bytes: Shorter strings are parsed with the rest.
        piece_bytes: How much of a long string is decoded at a time.

    Returns:
        The line's value, in which a name stands for each long string; and the strings by name.

    Raises:
        ValueError: as ``parse_json``, with the column of the whole line.
        UnicodeDecodeError: it is not UTF-8.
    """
    if _BEGINS_LIST.match(line):
        return [], {}
    drawn = uuid.uuid4().hex  # in no string of the line
    parts, strings = list[str](), dict[str, LongString]()
    at, quote = 0, line.find(b'"')
    while quote >= 0:
        start = quote + 1
        inside = _INSIDE.match(line, start)
        stop = inside.end() if inside else start
        if stop - start >= long_bytes:
            name = f"{drawn}-{len(strings)}"
            strings[name] = LongString(line, start, stop, piece_bytes)
            parts += _decode(line, at, start), name
            at = stop
        quote = line.find(b'"', stop + 1)
    text = "".join((*parts, _decode(line, at, len(line))))
    try:
        return parse_json(text), strings
    except json.JSONDecodeError as error:
        before = [name for name in strings if name in text[: error.pos]]
        left_out = sum(strings[name].characters - len(name) for name in before)
        raise json.JSONDecodeError(error.msg, "", error.pos + left_out) from None


def _whole_escapes(text: str) -> int:
    """Where the last escape of a text begins if it is cut off; else the text's length."""
    last = text.rfind("\\", -6)
    run = len(text[: last + 1]) - len(text[: last + 1].rstrip("\\"))
    is_cut_off = run % 2 and len(text) - last < (6 if text[last + 1 : last + 2] == "u" else 2)
    return last if is_cut_off else len(text)


def _decode(line: bytearray, start: int, stop: int) -> str:
    try:
        return line[start:stop].decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(line, start, error) from None


def _not_utf8(line: bytearray, begin: int, error: UnicodeDecodeError) -> UnicodeDecodeError:
    """An error of a part of a line that begins there, as one of the line."""
    start, end = begin + error.start, begin + error.end
    return UnicodeDecodeError("utf-8", bytes(line), start, end, error.reason)


def _characters(line: bytearray, start: int, stop: int) -> int:
    """Characters of a line's bytes."""
    return sum(
        len(line[at : min(at + _PIECE_BYTES, stop)].translate(None, _NO_FIRST_BYTE))
        for at in range(start, stop, _PIECE_BYTES)
    )
