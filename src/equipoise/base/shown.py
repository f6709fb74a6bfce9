"""Show a value of a user's file or flag on one line, short enough for a sentence."""

import json
from collections.abc import Iterable

_LONGEST = 60
_KEPT = 24


def shown(value: object) -> str:
    """A value as JSON writes it, with the middle of a long one left out.

    >>> shown("gelu"), shown(None), shown({"bits": 4})
    ('"gelu"', 'null', '(a table)')
    >>> shown(10**500)
    '100000000000000000000000...000000000000000000000000 (501 characters)'
    """
    if isinstance(value, dict):
        return "(a table)"
    try:
        return shorten(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return f"(a {type(value).__name__})"


def shorten(text: str, longest: int = _LONGEST) -> str:
    r"""A text on one line, with the middle of a long one left out.

    >>> shorten("short"), shorten("x" * 80), shorten("a\nb")
    ('short', 'xxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxx (80 characters)', 'a\\nb')
    """
    size = len(text)
    if size > longest:
        text = f"{text[:_KEPT]}...{text[-_KEPT:]} ({size:,} characters)"
    return printable(text)


def listed(names: Iterable[object], most: int = 12) -> str:
    """Names in a sentence, each on one line; of many only the first.

    >>> listed("abc"), listed(range(20), most=3)
    ('a, b, c', '0, 1, 2 and 17 more')
    """
    texts = [shorten(str(each)) for each in names]
    left = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {left:,} more" if left > 0 else "")


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "rank"), counted(1200, "row"), counted(0, "table")
    ('1 rank', '1,200 rows', '0 tables')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    r"""A text on one line, with line breaks and control characters escaped.

    >>> printable("a\nb\x1b[2J")
    'a\\nb\\x1b[2J'
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
