"""The line of each key of a TOML text.

Why
    ``tomllib`` keeps no line numbers, so a small scanner finds them again.

Kept true (tests/unit/spec/test_locate.py, by Hypothesis)
    Each key of a TOML text is located at its line.
"""

import re
import tomllib

TomlPath = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"""(?:"{0,2})'
    r"|'''.*?'''(?:'{0,2})"
    r'|"(?:[^"\\]|\\.)*"'
    r"|'[^']*'",
    re.DOTALL,
)
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BARE_VALUE = re.compile(r"[^,\]}#\n]*")


def locate(text: str) -> dict[TomlPath, int]:
    r"""The line of every key and table of a TOML text that ``tomllib`` has accepted.

    A key is located where it is written, a table where it is first named; an item of a list has
    its index in the path.

    >>> locate("[train]\nsteps = 3\nadam = { eps = 1e-8 }")[("train", "adam", "eps")]
    3
    """
    return _Scanner(text).scan()


class _Scanner:
    """Walks TOML known to be valid and notes lines, without reading values."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._lines: dict[TomlPath, int] = {}
        self._table: TomlPath = ()
        self._tables_in: dict[TomlPath, int] = {}

    def scan(self) -> dict[TomlPath, int]:
        self._skip(_BLANK)
        while self._at < len(self._text):
            if self._text[self._at] == "[":
                self._header()
            else:
                self._pair(self._table)
            self._skip(_BLANK)
        return self._lines

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise AssertionError(f"not TOML at {self._at}, though tomllib accepted it")
        self._at = match.end()
        return match.group()

    def _note(self, path: TomlPath) -> None:
        line = self._text.count("\n", 0, self._at) + 1
        for stop in range(1, len(path) + 1):
            self._lines.setdefault(path[:stop], line)

    def _header(self) -> None:
        is_list = self._text.startswith("[[", self._at)
        self._at += 2 if is_list else 1
        *parents, last = self._key()
        path: TomlPath = ()
        for part in parents:
            path = self._enter((*path, part))
        path = (*path, last)
        if is_list:
            self._tables_in[path] = self._tables_in.get(path, 0) + 1
        self._table = self._enter(path)
        self._note(self._table)
        self._at += 2 if is_list else 1

    def _enter(self, path: TomlPath) -> TomlPath:
        """A table, or the newest table of a list of tables."""
        count = self._tables_in.get(path)
        return path if count is None else (*path, count - 1)

    def _key(self) -> list[str]:
        parts: list[str] = []
        while True:
            self._skip(_SPACE)
            if self._text[self._at] in "\"'":
                quoted = self._skip(_STRING)
                parts.append(tomllib.loads(f"key = {quoted}")["key"])
            else:
                parts.append(self._skip(BARE_KEY))
            self._skip(_SPACE)
            if self._text[self._at] != ".":
                return parts
            self._at += 1

    def _pair(self, table: TomlPath) -> None:
        path = (*table, *self._key())
        self._note(path)
        self._at += 1  # the equals sign, on the same line as the key
        self._skip(_SPACE)
        self._value(path)

    def _value(self, path: TomlPath) -> None:
        first = self._text[self._at]
        if first == "[":
            self._items(path, "]")
        elif first == "{":
            self._items(path, "}")
        elif first in "\"'":
            self._skip(_STRING)
        else:
            self._skip(_BARE_VALUE)

    def _items(self, path: TomlPath, end: str) -> None:
        self._at += 1
        self._skip(_BLANK)
        index = 0
        while self._text[self._at] != end:
            if end == "}":
                self._pair(path)
            else:
                self._note((*path, index))
                self._value((*path, index))
                index += 1
            self._skip(_BLANK)
            if self._text[self._at] == ",":
                self._at += 1
                self._skip(_BLANK)
        self._at += 1
