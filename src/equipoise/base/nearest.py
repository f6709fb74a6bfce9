"""The nearest known word, for errors about unknown ones."""

import difflib
from collections.abc import Iterable


def nearest(word: str, words: Iterable[str]) -> str:
    """The member of ``words`` most similar to ``word``, whatever its case.

    >>> nearest("layout.cpp", ["layout.cp", "layout.dp", "train.steps"])
    'layout.cp'
    >>> nearest("EXACT", ["fixed", "exact"])
    'exact'
    """
    candidates = list(words)
    ratios = [
        difflib.SequenceMatcher(a=word.casefold(), b=other.casefold()).ratio()
        for other in candidates
    ]
    return candidates[ratios.index(max(ratios))]
