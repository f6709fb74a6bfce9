"""Read untrusted files and texts.

Why
    A pipe that nobody writes to, a name with a NUL, brackets nested 100,000 deep and a number of
    5,000 digits each raise an exception of their own, deep in a library. Here they become the two
    that every reader expects: OSError for the file, ValueError for its content.

Kept true (tests/unit/base/test_read.py)
    Whatever the bytes, only these two are raised, with a reason of one line.
"""

import codecs
import errno
import json
import os
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from equipoise.base.damage import plain_words
from equipoise.base.errors import SpecError

_DEEPEST = 64
"""Most levels of brackets; equipoise itself writes 6."""
_MOST_BITS = 64
_LONG = 1 << 16
_TOO_LONG = f"a whole number has more digits than {_MOST_BITS} bits hold"
_DIGITS = re.compile(r"\d{20}")
"""Numbers with at least this many digits may exceed 64 bits."""
DESCRIPTORS = ("/dev/fd/", "/proc/", "/dev/stdin")
"""Beginnings of names of what a process has open."""


def real_path(path: Path) -> Path:
    """A path without links; a loop of links stays, and fails when it is opened.

    ``Path.resolve`` raises a RuntimeError at a loop.
    """
    return Path(os.path.realpath(path))


def user_path(text: str) -> Path:
    """A path as a person writes it: ``~`` and ``~name`` are homes, where there is such a user.

    ``Path.expanduser`` raises a RuntimeError at a file that is called ``~$cat.png``.

    Raises:
        SpecError: it begins in the home of a user who has none.
    """
    path = Path(text)
    try:
        return path.expanduser()
    except RuntimeError:
        if path.parts[0] != "~":
            return path
    raise SpecError(
        f"{text} begins in a home folder, and this system knows none for user {os.getuid()}. Set "
        f"HOME, or give a path without ~."
    )


def require_file(path: Path) -> None:
    """Refuse what is not a regular file, such as a folder, an idle pipe or an endless device.

    Raises:
        OSError: it is missing, or not a file; with a reason.
    """
    try:
        mode = path.stat().st_mode
        # A shell's <(...) is a pipe that has a writer.
        is_file = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
        if not is_file and not str(path).startswith(DESCRIPTORS):
            raise OSError(errno.EINVAL, "It is a pipe, a socket or a device, not a file")
    except ValueError:  # a NUL or a lone surrogate in the name
        raise OSError(errno.EINVAL, "The name has a character that no file name can have") from None


def read_bytes(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: as ``require_file``, or it cannot be read.
    """
    require_file(path)
    return path.read_bytes()


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a mark of byte order.

    Raises:
        OSError: as ``read_bytes``.
        ValueError: it is not UTF-8.
    """
    data = read_bytes(path)
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"it is not UTF-8 text: line {line:,}") from None


def reason(error: Exception) -> str:
    """Why a file could not be read, as part of a sentence.

    >>> reason(FileNotFoundError(2, "No such file or directory", "a.json"))
    'no such file or directory'
    >>> reason(KeyError("files"))
    'it lacks "files"'
    """
    if isinstance(error, FileExistsError):  # of a folder that was to be made
        return "a file of that name is in its place"
    if isinstance(error, LookupError):
        key = error.args[0] if isinstance(error, KeyError) and error.args else None
        return f'it lacks "{key}"' if isinstance(key, str) else "a list in it is too short"
    if isinstance(error, UnicodeError):
        return "a text in it is not UTF-8"
    if isinstance(error, TypeError | AttributeError):
        return "a value in it has another type than it must have"
    if hasattr(error, "errors"):  # pydantic's; the first fault is enough
        return _say_first(error.errors(include_url=False)[0])
    words = getattr(error, "strerror", None)
    return f"{words[0].lower()}{words[1:]}" if words else plain_words(str(error))


def _say_first(fault: dict[str, Any]) -> str:
    """What pydantic says of a value, as part of a sentence.

    >>> _say_first({"loc": ("a", 0), "msg": "Input should be a valid number, unable to parse it"})
    'a.0 must be a number'
    """
    place, words = ".".join(map(str, fault["loc"])), fault["msg"]
    if words == "Field required":
        return f"it lacks {place}"
    if must := re.fullmatch(r"Input should be ((?:an?|'[^,]*',|\d+,) .*?)(, unable.*)?", words):
        kind = re.sub(r"an? (valid )?dictionary.*|an object", "a table", must[1])
        kind = re.sub(r"^a valid (tuple|list|array)", "a list", kind)
        kind = kind.replace("a valid integer", "a whole number").replace("valid ", "")
        return f"{place} must be {kind}"
    return f"{place}: {words[0].lower()}{words[1:]}"


class LongNumberError(ValueError):
    """A whole number in a text is longer than any that counts something."""

    def __init__(self, place: tuple[str | int, ...] = ()) -> None:
        super().__init__(_TOO_LONG)
        self.place = place
        """Keys and positions that lead to it."""


class NotJsonError(json.JSONDecodeError):
    """A text is not JSON; in words for a sentence."""

    def __str__(self) -> str:
        words = self.msg.removesuffix(" at").removesuffix(" starting")
        at = f"line {self.lineno:,}, column {self.colno:,}"
        return f"it is not JSON at {at}: {words[:1].lower()}{words[1:]}"


def parse_json(text: str | bytes, *, once: bool = False) -> Any:
    """Parse a JSON text; bytes may begin with a mark of byte order.

    Args:
        text: The text.
        once: Whether a key may stand in an object only once; else the last one counts.

    Raises:
        ValueError: it is not JSON, or has an absurd number (``LongNumberError``) or nesting, or a
            key twice.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: brackets are nested more than 64 deep
    """
    try:
        if isinstance(text, bytes):
            text = text.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        value = _load_json(text, _unrepeated if once else None)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise NotJsonError(error.msg, error.doc, error.pos) from None
    # Looking for digits in a long text takes longer than to look at its values.
    is_long = len(text) > _LONG or text.count("[") + text.count("{") > _DEEPEST
    if is_long or _DIGITS.search(text):
        _require_sane(value)
    return value


def _load_json(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None) -> Any:
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        if not _is_too_long(error):
            raise
        # With its first digits alone the number is still too long, and has a place.
        return json.loads(
            text, parse_int=lambda digits: int(digits[:_MOST_BITS]), object_pairs_hook=pairs
        )


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different."""
    table = dict(pairs)
    if len(table) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object in it has {json.dumps(name[:60])} twice; give it once")
    return table


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text.

    Raises:
        tomllib.TOMLDecodeError: it is not TOML.
        ValueError: it has an absurd number or nesting.
    """
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:
        raise (LongNumberError() if _is_too_long(error) else error) from None
    _require_sane(table)
    return table


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        OSError: as ``read_bytes``.
        ValueError: as ``parse_json``.
    """
    return parse_json(read_text(path))


def _require_sane(value: object) -> None:
    level = [value]
    for _ in range(_DEEPEST + 1):
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
            elif isinstance(each, int) and each.bit_length() > _MOST_BITS:
                raise LongNumberError(_place_of_long(value))
        if not inner:
            return
        level = inner
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"brackets are nested more than {_DEEPEST} deep")


def _place_of_long(value: object) -> tuple[str | int, ...]:
    """Where the first number is that is too long."""
    left: list[tuple[tuple[str | int, ...], object]] = [((), value)]
    while left:
        place, each = left.pop()
        if isinstance(each, int) and each.bit_length() > _MOST_BITS:
            return place
        inner: list[tuple[str | int, object]] = []
        if isinstance(each, dict):
            inner += each.items()
        elif isinstance(each, list):
            inner += enumerate(each)
        left += [((*place, key), item) for key, item in reversed(inner)]
    return ()


def _is_too_long(error: ValueError) -> bool:
    # Python refuses to convert more than sys.get_int_max_str_digits() digits.
    return "integer string conversion" in str(error)
