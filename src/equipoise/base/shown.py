"""A value of a user's file or flag, short enough for one sentence and on one line."""

import json

_LONGEST = 60
_KEPT = 24


def shown(value: object) -> str:
    """A value as JSON writes it, with its middle left out where it is long.

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
    r"""A text on one line, with its middle left out where it is long.

    >>> shorten("short"), shorten("x" * 80), shorten("a\nb")
    ('short', 'xxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxx (80 characters)', 'a\\nb')
    """
    size = len(text)
    if size > longest:
        text = f"{text[:_KEPT]}...{text[-_KEPT:]} ({size:,} characters)"
    return printable(text)


def printable(text: str) -> str:
    r"""A text on one line: line breaks and what no terminal shows are escaped.

    >>> printable("a\nb\x1b[2J")
    'a\\nb\\x1b[2J'
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
