"""Patterns that stand for weights by their names, as ``train.freeze`` gives them.

Kept true (tests/unit/train/test_trained.py)
    A pattern names a weight or everything below a name, and nothing that merely begins alike.
"""

import re
from collections.abc import Iterable

_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")

_MOST_LAYERS = 4096
"""As run.toml has them."""


def match_names(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern of ``train.freeze`` stands for.

    >>> match_names("layers.0-1.norm", ["layers.1.norm.weight", "layers.2.norm.weight"])
    ['layers.1.norm.weight']
    >>> match_names("*.bias", ["layers.0.query.bias", "norm.weight"])
    ['layers.0.query.bias']
    """
    shape = re.compile(r"\.".join(map(_part, pattern.split("."))) + r"(?:\..*)?", re.DOTALL)
    return [name for name in names if shape.fullmatch(name)]


def match_any(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names that some pattern stands for, in their order."""
    names = list(names)
    matched = {name for pattern in patterns for name in match_names(pattern, names)}
    return [name for name in names if name in matched]


def _part(part: str) -> str:
    """The regular expression of what stands between two dots of a pattern."""
    if span := _RANGE.fullmatch(part):
        numbers = range(int(span[1]), min(int(span[2]), _MOST_LAYERS) + 1)
        return f"(?:{'|'.join(map(str, numbers))})" if numbers else r"(?!)"
    return ".*".join(map(re.escape, part.split("*")))
