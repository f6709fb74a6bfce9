"""Counts of a command line: at least one, and no more than a verb can work through."""

import argparse
from collections.abc import Mapping

from equipoise.base.errors import SpecError

MOST_SHARING = 1024
"""Ranks of one context."""
MOST_STEPS = 10_000
MOST_MICRO_BATCHES = 1 << 16


def require_counts(args: argparse.Namespace, most: Mapping[str, int]) -> None:
    """Refuse a count that is too small or too large; one that is not given is neither.

    Args:
        args: What was parsed.
        most: The largest value of each flag, by its name in ``args``.

    Raises:
        SpecError: names the flag, its value and its limit.
    """
    for name, limit in most.items():
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and value < 1:
            raise SpecError(f"{flag} {value} is below 1. Give 1 or more.")
        if value is not None and value > limit:
            raise SpecError(f"{flag} {value:,} is more than {limit:,}. Give {limit:,} or less.")
