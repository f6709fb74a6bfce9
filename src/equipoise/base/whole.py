"""A whole number that somebody typed, whatever they typed.

Why
    ``"²".isdigit()`` is true and ``int("²")`` fails; ``int`` refuses more than 4,300 digits; other
    scripts have digits of their own. Each is an exception where a sentence should stand.

Kept true (tests/unit/base/test_whole.py)
    Whatever the text, the answer is a number of at most 18 digits or None.
"""

import re

_WHOLE = re.compile(r"[0-9]{1,18}")
"""Below 2**63, which is more than anything counts."""


def whole_number(text: str) -> int | None:
    """The number that ASCII digits alone write; None for any other text.

    >>> whole_number("12"), whole_number("-1"), whole_number("²"), whole_number("9" * 5000)
    (12, None, None, None)
    """
    return int(text) if _WHOLE.fullmatch(text) else None
